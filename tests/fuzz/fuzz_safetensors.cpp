// Files of any bytes, by libFuzzer: read, or refused with a ToolError of one line.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "replay/trace.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate;

namespace {

template <class Read>
void read_or_refuse(const Read& read) {
  try {
    read();
  } catch (const tools::ToolError& error) {
    const std::string line = error.what();
    if (!line.empty() && line.find('\n') == std::string::npos) return;
    std::fprintf(stderr, "broken: an error of more than a line\n");
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const testing::TemporaryDirectory directory;
  static const auto path = directory / "fuzzed.safetensors";
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || std::fwrite(data, 1, size, file) != size) std::abort();
  std::fclose(file);
  read_or_refuse([] {
    tools::SafetensorsFile tensors(path);
    for (const auto& tensor : tensors.tensors()) {
      read_or_refuse([&] { (void)tensors.to_float(tensor.first); });
    }
  });
  read_or_refuse([] { (void)tools::load_trace(path); });
  return 0;
}
