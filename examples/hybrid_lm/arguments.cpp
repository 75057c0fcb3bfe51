#include "arguments.hpp"

#include <filesystem>
#include <fstream>

#include "replay/atomic_file.hpp"
#include "replay/policy_flags.hpp"

namespace sinkstate::hybrid_lm {

using tools::ToolError;

CLI::Option* add_number(CLI::App* app, const char* option, std::ptrdiff_t& value,
                        const char* meaning) {
  return app->add_option(option, value, meaning)->transform(tools::whole_number<std::ptrdiff_t>());
}
CLI::Option* add_number(CLI::App* app, const char* option, double& value, const char* meaning) {
  return app->add_option(option, value, meaning)->check(tools::check_real_number);
}

CLI::Option* add_path(CLI::App* app, const char* option, std::string& path, const char* meaning) {
  return app->add_option(option, path, meaning)->check([](const std::string& given) {
    return given.empty() ? "wanted a path, given an empty one" : "";
  });
}

std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream || std::filesystem::is_directory(path)) throw ToolError(path + ": cannot be read");
  std::string text;
  for (char c = 0; stream.get(c);) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < ' ' && (byte < '\t' || byte > '\r')) {
      throw ToolError(path + ": wanted a text, given byte " + std::to_string(byte) + " at offset " +
                      std::to_string(text.size()));
    }
    text += c;
  }
  if (stream.bad()) throw ToolError(path + ": cannot be read");
  if (text.empty()) throw ToolError(path + ": wanted a text, given an empty file");
  return text;
}

void require_different(const std::string& model_folder, std::vector<NamedFile> outputs,
                       const std::string& text) {
  std::vector<NamedFile> files{{"text", text}};
  for (const char* const name : {"/config.json", "/model.safetensors", "/golden.safetensors"}) {
    files.push_back({"--model", model_folder + name});
  }
  for (const NamedFile& output : outputs) {
    for (const NamedFile& other : files) {
      if (output.path.empty() || other.path.empty()) continue;
      if (!tools::same_file(output.path, other.path)) continue;
      tools::refuse(output.what, "a file of its own", std::string("that of ") + other.what);
    }
    files.push_back(output);
  }
}

}  // namespace sinkstate::hybrid_lm
