#include <cstdio>
#include <sinkstate/core/status.hpp>
#include <sinkstate/version.hpp>

int main() { std::printf("sinkstate %s, core alone\n", sinkstate::version); }
