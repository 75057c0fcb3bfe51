/// @file
/// Output files that appear whole or not at all, and the error that every tool ends with.
#pragma once

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sinkstate::tools {

/// A file or an argument that a tool cannot work with. what() is one line that names it, with the
/// wanted and the given value; a tool prints it and exits with code 2.
class ToolError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ToolError(const std::filesystem::path& file, const std::string& what)
      : std::runtime_error(file.string() + ": " + what) {}
};

/// Writes to a temporary file beside `target` and renames it to `target` on commit().
///
/// Opening proves that the target can be written, so open it before long work. Without a commit the
/// target keeps what it held and nothing is left beside it. Every failure throws a ToolError.
class AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::filesystem::path& target() const { return target_; }

  void write(const void* bytes, std::size_t count);
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// What was written is on its way: a full disk shows here, while other files can still be
  /// withheld.
  void flush();

  /// Flushes, closes and renames; the last call on this object.
  void commit();

 private:
  [[noreturn]] void fail(int error) const;

  std::filesystem::path target_;
  std::filesystem::path temporary_;
  std::FILE* stream_ = nullptr;
};

/// Opened before long work, so that it can be refused; null for an empty path.
std::unique_ptr<AtomicFile> open_output(const std::string& path);

/// All files or none: each is flushed before the first is committed. Null pointers are passed over.
void commit_all(std::initializer_list<AtomicFile*> files);

/// Whether two paths, of files that may not exist yet, lead to one place.
bool same_file(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace sinkstate::tools
