/// @file
/// Reading and writing safetensors files: a little-endian 64-bit header length, a JSON header, then
/// the tensors, row-major and little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "atomic_file.hpp"

namespace sinkstate::tools {

/// The types that convert to float exactly.
enum class FloatType { f32, f16, bf16 };

/// `text` from a file, made fit for one line of a message: in quotes, escaped, cut when long.
std::string quote(std::string_view text);

/// "[2, 3]"
std::string to_string(const std::vector<std::size_t>& shape);

struct TensorInfo {
  std::string dtype;  // as the file spells it
  std::vector<std::size_t> shape;
  std::size_t elements;
  std::size_t element_bytes;
  std::uint64_t offset;  // of the first byte, from the start of the file
};

/// A file whose header has been checked as a whole; tensors are read when asked for.
///
/// Stricter than the format where that costs no real file anything, and as strict where parsers
/// often are not: keys are unique, and the tensors cover the data without hole, overlap or rest.
/// Bytes are assembled one by one, so neither alignment in the file nor host byte order matters.
class SafetensorsFile {
 public:
  /// Throws a ToolError for a file that is missing, truncated or malformed.
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }

  bool contains(const std::string& name) const { return tensors_.count(name) > 0; }

  /// Throws a ToolError when there is no such tensor.
  const TensorInfo& info(const std::string& name) const;

  /// Throws a ToolError unless the tensor is F32, F16 or BF16.
  FloatType float_type(const std::string& name) const;

  /// All elements, row-major. Throws a ToolError as float_type() does, or when reading fails.
  std::vector<float> to_float(const std::string& name);

 private:
  [[noreturn]] void fail(const std::string& what) const { throw ToolError(path_, what); }
  void read(std::uint64_t offset, void* bytes, std::size_t count);

  std::filesystem::path path_;
  std::ifstream stream_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, TensorInfo> tensors_;
};

/// A tensor to be written; `values` is only looked at.
struct OutputTensor {
  std::string name;
  FloatType type;
  std::vector<std::size_t> shape;
  const std::vector<float>* values;
};

/// Writes a whole file; the caller commits. Wider elements come first and the header is padded to a
/// multiple of 8 bytes, so that every tensor is aligned. Throws a ToolError for a name given twice,
/// for values that do not fill the shape, and for a finite value that the type cannot hold.
void write_safetensors(AtomicFile& file, const std::map<std::string, std::string>& metadata,
                       std::vector<OutputTensor> tensors);

}  // namespace sinkstate::tools
