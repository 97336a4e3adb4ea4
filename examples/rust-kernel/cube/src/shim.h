// What the text of a `#[cube]` kernel expects of CUDA, for a compiler for the CPU. It is right for
// kernels without barriers (`sync_cube`), planes and shared memory, and it is there for tests: the
// threads run one after another.
#include <cmath>
#include <cstddef>
#include <cstdint>
#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __grid_constant__
struct Index {
  unsigned x, y, z;
};
static thread_local Index blockIdx, threadIdx, gridDim;
using std::exp;  // of floats, too, as CUDA's exp
