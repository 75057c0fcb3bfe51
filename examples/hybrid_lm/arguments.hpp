/// @file
/// What the command lines over this model have in common: numbers, paths, texts.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <string>
#include <vector>

namespace sinkstate::hybrid_lm {

CLI::Option* add_number(CLI::App* app, const char* option, std::ptrdiff_t& value,
                        const char* meaning);
CLI::Option* add_number(CLI::App* app, const char* option, double& value, const char* meaning);
/// Not an empty one.
CLI::Option* add_path(CLI::App* app, const char* option, std::string& path, const char* meaning);

/// Bytes are looked at as they come, so that a device or a binary is refused at once.
/// @throws tools::ToolError for what is no text
std::string read_text(const std::string& path);

struct NamedFile {
  const char* what;
  std::string path;
};
/// No output may be another file of the command, or the model's; empty paths are no files.
/// @throws tools::ToolError
void require_different(const std::string& model_folder, std::vector<NamedFile> outputs,
                       const std::string& text);

}  // namespace sinkstate::hybrid_lm
