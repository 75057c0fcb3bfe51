#include "atomic_file.hpp"

#include <cassert>
#include <cerrno>
#include <system_error>
#include <utility>

namespace sinkstate::tools {

namespace fs = std::filesystem;

AtomicFile::AtomicFile(fs::path target) : target_(std::move(target)) {
  if (target_.empty()) throw ToolError("output file: wanted a path, given an empty one");
  std::error_code ignored;  // a target that cannot be looked at fails below, when it is opened
  const fs::file_status status = fs::status(target_, ignored);
  if (fs::exists(status)) {
    // Renaming over a device or a directory is never what was meant.
    if (!fs::is_regular_file(status)) {
      throw ToolError(target_, "cannot be written: not a regular file");
    }
    // A rename asks the directory for permission, not the file that it replaces.
    std::FILE* present = std::fopen(target_.c_str(), "ab");
    if (present == nullptr) fail(errno);
    std::fclose(present);
    target_ = fs::canonical(target_);  // a symbolic link stays one
  }
  for (int attempt = 0; stream_ == nullptr; ++attempt) {
    temporary_ = target_;
    temporary_ += ".tmp" + std::to_string(attempt);
    stream_ = std::fopen(temporary_.c_str(), "wbx");
    if (stream_ == nullptr && (errno != EEXIST || attempt == 999)) fail(errno);
  }
}

AtomicFile::~AtomicFile() {
  if (stream_ != nullptr) std::fclose(stream_);
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove(temporary_, ignored);
}

void AtomicFile::write(const void* bytes, std::size_t count) {
  assert(stream_ != nullptr);
  if (count > 0 && std::fwrite(bytes, 1, count, stream_) != count) fail(errno);
}

void AtomicFile::flush() {
  assert(stream_ != nullptr);
  if (std::fflush(stream_) != 0) fail(errno);
}

void AtomicFile::commit() {
  assert(stream_ != nullptr);
  // Bytes still in the buffer may be the ones that do not fit on the disk.
  if (std::fclose(std::exchange(stream_, nullptr)) != 0) fail(errno);
  std::error_code error;
  fs::rename(temporary_, target_, error);
  if (error) fail(error.value());
  temporary_.clear();
}

std::unique_ptr<AtomicFile> open_output(const std::string& path) {
  return path.empty() ? nullptr : std::make_unique<AtomicFile>(path);
}

void commit_all(std::initializer_list<AtomicFile*> files) {
  for (AtomicFile* const file : files) {
    if (file != nullptr) file->flush();
  }
  for (AtomicFile* const file : files) {
    if (file != nullptr) file->commit();
  }
}

bool same_file(const fs::path& a, const fs::path& b) {
  std::error_code error;  // what cannot be looked at is refused when it is opened
  const fs::path known_a = fs::weakly_canonical(fs::absolute(a), error);
  const fs::path known_b = fs::weakly_canonical(fs::absolute(b), error);
  return !known_a.empty() && known_a == known_b;
}

void AtomicFile::fail(int error) const {
  throw ToolError(target_, "cannot be written: " + std::generic_category().message(error));
}

}  // namespace sinkstate::tools
