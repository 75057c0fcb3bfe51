#include "safetensors.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sinkstate/core/number_formats.hpp>
#include <utility>

namespace sinkstate::tools {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::numeric_limits<float>::is_iec559 && sizeof(float) == 4,
              "F32 tensors are read into float bit by bit");
static_assert(sizeof(std::size_t) == 8, "sizes in a header are 64-bit numbers");

constexpr std::size_t length_bytes = 8;
constexpr std::uint64_t max_header_bytes = 100'000'000;  // the limit of the reference parser
constexpr std::size_t chunk_bytes = std::size_t{1} << 16;
constexpr const char* metadata_key = "__metadata__";

struct DType {
  const char* name;
  std::size_t bytes;
};
constexpr DType dtypes[] = {{"BOOL", 1},    {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1},
                            {"F8_E8M0", 1}, {"U16", 2}, {"I16", 2}, {"F16", 2},     {"BF16", 2},
                            {"U32", 4},     {"I32", 4}, {"F32", 4}, {"U64", 8},     {"I64", 8},
                            {"F64", 8},     {"C64", 8}};

std::uint64_t load_little_endian(const unsigned char* bytes, std::size_t count) {
  std::uint64_t value = 0;
  for (std::size_t i = count; i-- > 0;) value = value << 8 | bytes[i];
  return value;
}

void store_little_endian(std::uint64_t value, unsigned char* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i, value >>= 8) {
    bytes[i] = static_cast<unsigned char>(value & 0xFF);
  }
}

std::size_t size_of(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

const char* name_of(FloatType type) {
  return type == FloatType::f32 ? "F32" : type == FloatType::f16 ? "F16" : "BF16";
}

std::uint32_t encode(float value, FloatType type) {
  switch (type) {
    case FloatType::f16:
      return round_to_nearest<Float16>(value);
    case FloatType::bf16:
      return round_to_nearest<BFloat16>(value);
    case FloatType::f32:
      break;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float decode(std::uint32_t bits, FloatType type) {
  switch (type) {
    case FloatType::f16:
      return widen<Float16>(static_cast<std::uint16_t>(bits));
    case FloatType::bf16:
      return widen<BFloat16>(static_cast<std::uint16_t>(bits));
    case FloatType::f32:
      break;
  }
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// False when the product does not fit.
bool multiply(std::size_t a, std::size_t b, std::size_t& product) {
  if (b != 0 && a > std::numeric_limits<std::size_t>::max() / b) return false;
  product = a * b;
  return true;
}

// A message without a file name; the reader of the file adds it.
struct HeaderError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool condition, const std::string& what) {
  if (!condition) throw HeaderError(what);
}

// Refuses what the parser alone would let pass: a key given twice (it keeps the last) and nesting
// beyond the three levels of a header (it follows any).
json parse_header(const std::string& text) {
  // The parser skips a byte order mark and takes a NUL for the end.
  require(!text.empty() && text.front() == '{', "header: wanted a JSON object from its first byte");
  require(text.find('\0') == std::string::npos, "header: wanted JSON, given a NUL byte");
  std::vector<std::set<std::string>> open_objects;
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
        require(depth < 3, "header: nested too deeply");
        open_objects.emplace_back();
        break;
      case json::parse_event_t::array_start:
        require(depth < 3, "header: nested too deeply");
        break;
      case json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        const bool first = open_objects.back().insert(key).second;
        if (!first) throw HeaderError("header: key " + quote(key) + " is given twice");
        break;
      }
      case json::parse_event_t::object_end:
        open_objects.pop_back();
        break;
      default:
        break;
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::parse_error& error) {
    throw HeaderError("header: not valid JSON at byte " + std::to_string(error.byte));
  } catch (const json::exception&) {
    throw HeaderError("header: not valid JSON");
  }
}

std::vector<std::size_t> read_sizes(const json& entry, const char* key) {
  const auto list = entry.find(key);
  require(list != entry.end() && list->is_array(), std::string(key) + ": wanted a list");
  std::vector<std::size_t> sizes;
  for (const json& size : *list) {
    if (!size.is_number_unsigned()) {
      throw HeaderError(std::string(key) + ": wanted integers from 0 to 2^64 - 1, given " +
                        quote(size.dump(-1, ' ', true)));
    }
    sizes.push_back(size.get<std::size_t>());
  }
  return sizes;
}

TensorInfo read_entry(const json& entry, std::uint64_t data_offset, std::uint64_t data_bytes) {
  require(entry.is_object(), "wanted an object with dtype, shape and data_offsets");
  TensorInfo tensor{};

  const auto dtype = entry.find("dtype");
  require(dtype != entry.end() && dtype->is_string(), "dtype: wanted a string");
  tensor.dtype = dtype->get<std::string>();
  const auto* known = std::find_if(std::begin(dtypes), std::end(dtypes),
                                   [&](const DType& type) { return tensor.dtype == type.name; });
  require(known != std::end(dtypes), "dtype: unknown type " + quote(tensor.dtype));
  tensor.element_bytes = known->bytes;

  tensor.shape = read_sizes(entry, "shape");
  tensor.elements = 1;
  std::size_t bytes = 0;
  bool fits = true;
  for (const std::size_t extent : tensor.shape) {
    fits = fits && multiply(tensor.elements, extent, tensor.elements);
  }
  fits = fits && multiply(tensor.elements, tensor.element_bytes, bytes);
  require(fits, "shape " + to_string(tensor.shape) + ": too large");

  const std::vector<std::size_t> range = read_sizes(entry, "data_offsets");
  require(range.size() == 2, "data_offsets: wanted two numbers, given " + to_string(range));
  require(range[0] <= range[1] && range[1] <= data_bytes,
          "data_offsets: wanted begin <= end <= " + std::to_string(data_bytes) +
              " (the bytes after the header), given " + to_string(range));
  require(range[1] - range[0] == bytes,
          "data_offsets: wanted " + std::to_string(bytes) + " bytes for " + tensor.dtype + " " +
              to_string(tensor.shape) + ", given " + std::to_string(range[1] - range[0]));
  tensor.offset = data_offset + range[0];
  return tensor;
}

void require_tiling(const std::map<std::string, TensorInfo>& tensors, std::uint64_t begin,
                    std::uint64_t end) {
  struct Range {
    std::uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto& [name, tensor] : tensors) {
    const std::uint64_t bytes = tensor.elements * tensor.element_bytes;
    ranges.push_back({tensor.offset, tensor.offset + bytes, &name});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t covered = begin;
  for (const Range& range : ranges) {
    require(range.begin >= covered,
            "tensor " + quote(*range.name) + " overlaps the tensor before it");
    require(range.begin == covered, std::to_string(range.begin - covered) +
                                        " unused bytes before tensor " + quote(*range.name));
    covered = range.end;
  }
  require(covered == end, std::to_string(end - covered) + " unused bytes after the last tensor");
}

}  // namespace

std::string quote(std::string_view text) {
  constexpr std::size_t longest = 60;
  const bool cut = text.size() > longest;
  const json escaped = std::string(text.substr(0, longest)) + (cut ? "..." : "");
  return escaped.dump(-1, ' ', true, json::error_handler_t::replace);
}

std::string to_string(const std::vector<std::size_t>& shape) {
  constexpr std::size_t longest = 8;
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size() && i < longest; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() > longest ? ", ...]" : "]");
}

SafetensorsFile::SafetensorsFile(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  if (!fs::exists(status)) fail("cannot be read: " + error.message());
  // A directory opens and a pipe would block.
  if (!fs::is_regular_file(status)) fail("cannot be read: not a regular file");
  stream_.open(path_, std::ios::binary | std::ios::ate);
  if (!stream_) fail("cannot be read: it does not open");
  const auto file_bytes = static_cast<std::uint64_t>(stream_.tellg());
  if (file_bytes < length_bytes) {
    fail("wanted at least 8 bytes, given " + std::to_string(file_bytes));
  }

  unsigned char length[length_bytes];
  read(0, length, length_bytes);
  const std::uint64_t header_bytes = load_little_endian(length, length_bytes);
  const std::uint64_t limit = std::min(file_bytes - length_bytes, max_header_bytes);
  if (header_bytes > limit) {
    fail("header length: wanted at most " + std::to_string(limit) + ", given " +
         std::to_string(header_bytes) + " (truncated, or not a safetensors file)");
  }
  std::string text(header_bytes, '\0');
  read(length_bytes, text.data(), text.size());

  const std::uint64_t data_offset = length_bytes + header_bytes;
  try {
    const json header = parse_header(text);
    for (const auto& [name, entry] : header.items()) {
      if (name == metadata_key) {
        require(entry.is_object(), "__metadata__: wanted an object");
        for (const auto& [key, value] : entry.items()) {
          require(value.is_string(), "__metadata__: " + quote(key) + ": wanted a string");
          metadata_.emplace(key, value.get<std::string>());
        }
        continue;
      }
      try {
        tensors_.emplace(name, read_entry(entry, data_offset, file_bytes - data_offset));
      } catch (const HeaderError& what) {
        throw HeaderError("tensor " + quote(name) + ": " + what.what());
      }
    }
    require_tiling(tensors_, data_offset, file_bytes);
  } catch (const HeaderError& what) {
    fail(what.what());
  }
}

const TensorInfo& SafetensorsFile::info(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail("tensor " + quote(name) + " is missing");
  return found->second;
}

FloatType SafetensorsFile::float_type(const std::string& name) const {
  const std::string& dtype = info(name).dtype;
  for (const FloatType type : {FloatType::f32, FloatType::f16, FloatType::bf16}) {
    if (dtype == name_of(type)) return type;
  }
  fail("tensor " + quote(name) + ": dtype: wanted F32, F16 or BF16, given " + dtype);
}

std::vector<float> SafetensorsFile::to_float(const std::string& name) {
  const TensorInfo& tensor = info(name);
  const FloatType type = float_type(name);
  const std::size_t width = tensor.element_bytes;
  std::vector<float> values(tensor.elements);
  std::vector<unsigned char> chunk(std::min(chunk_bytes, tensor.elements * width));
  for (std::size_t done = 0; done < values.size();) {
    const std::size_t count = std::min(chunk.size() / width, values.size() - done);
    read(tensor.offset + done * width, chunk.data(), count * width);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = load_little_endian(&chunk[i * width], width);
      values[done + i] = decode(static_cast<std::uint32_t>(bits), type);
    }
    done += count;
  }
  return values;
}

void SafetensorsFile::read(std::uint64_t offset, void* bytes, std::size_t count) {
  stream_.seekg(static_cast<std::streamoff>(offset));
  stream_.read(static_cast<char*>(bytes), static_cast<std::streamsize>(count));
  if (!stream_) fail("cannot be read: an error, or another program has shortened it");
}

void write_safetensors(AtomicFile& file, const std::map<std::string, std::string>& metadata,
                       std::vector<OutputTensor> tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const OutputTensor& a, const OutputTensor& b) {
                     return size_of(a.type) > size_of(b.type);
                   });
  const auto fail = [&](const OutputTensor& tensor, const std::string& what) {
    throw ToolError(file.target(), "tensor " + quote(tensor.name) + ": " + what);
  };

  nlohmann::ordered_json header;
  header[metadata_key] = metadata;
  std::size_t end = 0;
  for (const OutputTensor& tensor : tensors) {
    if (header.contains(tensor.name)) fail(tensor, "the name is taken");
    std::size_t elements = 1;
    bool fits = true;
    for (const std::size_t extent : tensor.shape) {
      fits = fits && multiply(elements, extent, elements);
    }
    if (!fits || elements != tensor.values->size()) {
      fail(tensor, "wanted the values of shape " + to_string(tensor.shape) + ", given " +
                       std::to_string(tensor.values->size()));
    }
    const std::size_t begin = std::exchange(end, end + elements * size_of(tensor.type));
    header[tensor.name] = {
        {"dtype", name_of(tensor.type)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');

  unsigned char length[length_bytes];
  store_little_endian(text.size(), length, length_bytes);
  file.write(length, length_bytes);
  file.write(text);

  std::vector<unsigned char> chunk;
  for (const OutputTensor& tensor : tensors) {
    const std::size_t width = size_of(tensor.type);
    chunk.resize(chunk_bytes);
    for (std::size_t done = 0; done < tensor.values->size();) {
      const std::size_t count = std::min(chunk_bytes / width, tensor.values->size() - done);
      for (std::size_t i = 0; i < count; ++i) {
        const float value = (*tensor.values)[done + i];
        const std::uint32_t bits = encode(value, tensor.type);
        if (std::isfinite(value) && !std::isfinite(decode(bits, tensor.type))) {
          fail(tensor, "value " + std::to_string(value) + " does not fit " + name_of(tensor.type));
        }
        store_little_endian(bits, &chunk[i * width], width);
      }
      file.write(chunk.data(), count * width);
      done += count;
    }
  }
}

}  // namespace sinkstate::tools
