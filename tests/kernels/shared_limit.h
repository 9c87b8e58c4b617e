// What shared_limit.cu asks the stand-in for CUDA's run time in shared_limit.cpp.
#pragma once

#include <functional>
#include <map>

// Another thread's work, as soon as the next launch has begun.
extern std::function<void()> meanwhile;

// How often each kernel asked for another limit.
extern std::map<const void*, int> requests;
