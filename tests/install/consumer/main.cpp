#include <cstdio>
#include <cstring>
#include <sinkstate/sinkstate.hpp>

const char* version_seen_by_second_file();

int main() {
  std::printf("sinkstate %s\n", sinkstate::version);
  return std::strcmp(sinkstate::version, version_seen_by_second_file());
}
