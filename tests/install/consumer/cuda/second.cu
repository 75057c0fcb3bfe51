// A second file with the same headers: a function that is not inline would be defined twice.
#include <sinkstate/sinkstate_cuda.cuh>

const char* version_seen_by_second_file();
const char* version_seen_by_second_file() { return sinkstate::version; }
