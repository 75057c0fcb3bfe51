/// @file
/// The policy on a command line: the same flags for every tool.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstddef>
#include <limits>
#include <string>
#include <system_error>
#include <type_traits>

#include "replay.hpp"
#include "safetensors.hpp"

namespace sinkstate::tools {

[[noreturn]] void refuse(const std::string& option, const std::string& wanted,
                         const std::string& given);
void at_least(const std::string& option, std::ptrdiff_t least, std::ptrdiff_t given);

/// Text to whole numbers, strictly: CLI11 alone takes "" for 0, "010" for 8 and what is too large
/// for the largest.
template <class Number>
CLI::Validator whole_number() {
  return {[](std::string& text) -> std::string {
            Number value{};
            const char* const end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            if (error == std::errc::result_out_of_range) {
              using Limits = std::numeric_limits<Number>;
              return "wanted a number from " + std::to_string(Limits::min()) + " to " +
                     std::to_string(Limits::max()) + ", given " + quote(text);
            }
            if (error != std::errc() || stop != end) {
              return std::string("wanted a whole number") +
                     (std::is_signed_v<Number> ? "" : " from 0") + ", given " + quote(text);
            }
            text = std::to_string(value);
            return {};
          },
          ""};
}

/// For CLI11, an empty text is 0.
std::string check_real_number(const std::string& text);

/// Adds `--policy` and all that belongs to a policy to an application.
class PolicyFlags {
 public:
  PolicyFlags(CLI::App& app, ReplayOptions& options);
  PolicyFlags(const PolicyFlags&) = delete;  // the application points into it

  /// After parsing: fills the options.
  /// @throws ToolError for values and combinations without a meaning
  void resolve();

 private:
  CLI::App& app_;
  ReplayOptions& options_;
  std::string policy_ = "local-svd";
  std::string storage_ = "fp32";
  std::string rounding_ = "nearest";
  bool no_dense_fallback_ = false;
};

}  // namespace sinkstate::tools
