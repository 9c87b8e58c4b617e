// torch's ReLU, for every kernel and its gradient: NaN stays NaN and passes its gradient on, so that
// a run that diverges shows it in its loss. fmaxf(x, 0) would return 0.
#pragma once

#include "core/host_device.h"

namespace mf {

MF_HD inline bool passes(float x) { return !(x <= 0.0f); }

MF_HD inline float rectified(float x) { return passes(x) ? x : 0.0f; }

}  // namespace mf
