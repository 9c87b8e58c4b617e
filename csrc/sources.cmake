# The one list of native sources and flags. CMake includes this file; setup.py reads it through build_tools/sources.py,
# so keep to `set(NAME item item ...)` with literal items and whole-line comments. Paths are relative to csrc/.

set(MOSE_FAST_CPU_SOURCES
  cpu/null.cpp
  cpu/reservoir.cpp
  cpu/augment_parameters.cpp
  cpu/augment.cpp
  cpu/expert_losses.cpp
  cpu/adam.cpp
  cpu/norm_pool.cpp
)

# Torch-free; compiled by nvcc.
set(MOSE_FAST_CUDA_SOURCES
  cuda/null.cu
  cuda/reservoir.cu
  cuda/augment_parameters.cu
  cuda/expert_losses.cu
  cuda/augment.cu
  cuda/adam.cu
  cuda/norm_pool.cu
  cuda/align_conv.cu
  cuda/batch_norm_act.cu
  cuda/batch_norm_pool.cu
)

# Glue: two translation units, which include the ops' files; in a CUDA build compiled with MOSE_FAST_WITH_CUDA defined.
set(MOSE_FAST_TORCH_SOURCES
  torch/unit_maps.cpp
  torch/unit_rows.cpp
)

# No -std (torch decides) and no fast-math. Contraction is off because random decisions must be equal bit for bit on
# every machine. The two -fno change no value: loops with a choice or a root in them vectorise only without
# floating-point traps and errno. -g0 takes back the -g of Python's own flags, which costs a fifth of the time.
set(MOSE_FAST_CXX_FLAGS
  -O3
  -g0
  -fvisibility=hidden
  -Wall
  -fopenmp
  -ffp-contract=off
  -fno-math-errno
  -fno-trapping-math
)

# The kernels as well as the rest, compiled for the CPU by clang (MOSE_FAST_BACKEND=emulated). Without OpenMP: its run
# time would be clang's beside torch's GCC's. Kernels read and write numbers of one type as words of another: no strict
# aliasing.
set(MOSE_FAST_EMULATED_FLAGS
  -O2
  -g0
  -fno-strict-aliasing
  -fvisibility=hidden
  -Wall
  -Wno-unknown-pragmas
  -Wno-unused-variable
  -ffp-contract=off
  -fno-math-errno
  -fno-trapping-math
)

# Device code may fuse multiply and add; a file whose decisions must equal the CPU's bit for bit says so with
# intrinsics. torch.utils.cpp_extension hides the half and bfloat16 operators, CMake does not: -U makes both builds
# alike.
set(MOSE_FAST_NVCC_FLAGS
  -O3
  -lineinfo
  --expt-relaxed-constexpr
  -Xfatbin=-compress-all
  -Xcompiler=-fvisibility=hidden,-Wall,-ffp-contract=off
  -U__CUDA_NO_HALF_OPERATORS__
  -U__CUDA_NO_HALF_CONVERSIONS__
  -U__CUDA_NO_HALF2_OPERATORS__
  -U__CUDA_NO_BFLOAT16_CONVERSIONS__
)
