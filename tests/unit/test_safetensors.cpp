#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "replay/safetensors.hpp"
#include "support/catch.hpp"
#include "support/temporary_directory.hpp"

using namespace sinkstate::tools;
using sinkstate::testing::read_file;
using sinkstate::testing::TemporaryDirectory;
using sinkstate::testing::write_file;

namespace {

std::string little_endian(std::uint64_t value, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i, value >>= 8) bytes += static_cast<char>(value & 0xFF);
  return bytes;
}

std::string file_bytes(const std::string& header, const std::string& data) {
  return little_endian(header.size(), 8) + header + data;
}

// The message of the ToolError that `action` throws, empty when it throws none.
template <class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const ToolError& error) {
    return error.what();
  }
  return {};
}

std::string open_error(const TemporaryDirectory& directory, const std::string& bytes) {
  const auto path = directory / "file.safetensors";
  write_file(path, bytes);
  const std::string message = error_of([&] { SafetensorsFile file(path); });
  if (!message.empty()) {
    CHECK(message.rfind(path.string() + ": ", 0) == 0);
    CHECK(message.find('\n') == std::string::npos);
    CHECK(message.size() < 400);
  }
  return message;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a safetensors file comes back as it was written") {
  TemporaryDirectory directory;
  const auto path = directory / "file.safetensors";
  const std::vector<float> odd = {1, -2, 0.5f};
  const std::vector<float> matrix = {1, 2, 3, -4, 5e-42f, std::numeric_limits<float>::infinity()};
  const std::vector<float> none;
  const std::vector<float> many(100'000, 0.25f);
  AtomicFile output(path);
  write_safetensors(output, {{"format", "test"}, {"text", "a \"b\"\n\xC3\xA9"}},
                    {{"odd", FloatType::f16, {3}, &odd},
                     {"brain", FloatType::bf16, {1, 3}, &odd},
                     {"matrix", FloatType::f32, {2, 3}, &matrix},
                     {"none", FloatType::f32, {0, 7}, &none},
                     {"many", FloatType::f16, {100'000}, &many}});
  output.commit();

  SafetensorsFile file(path);
  CHECK(file.metadata().at("text") == "a \"b\"\n\xC3\xA9");
  CHECK(file.tensors().size() == 5);
  CHECK(file.to_float("odd") == odd);
  CHECK(file.to_float("brain") == odd);
  CHECK(file.to_float("matrix") == matrix);
  CHECK(file.to_float("none") == none);
  CHECK(file.to_float("many") == many);
  CHECK(file.float_type("brain") == FloatType::bf16);
  CHECK(file.info("matrix").shape == std::vector<std::size_t>{2, 3});
  for (const auto& [name, tensor] : file.tensors()) {
    CHECK(tensor.offset % tensor.element_bytes == 0);
  }
}

TEST_CASE("a tensor that starts at an odd byte is read right") {
  TemporaryDirectory directory;
  const auto path = directory / "file.safetensors";
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})";
  if (header.size() % 2 != 0) header += ' ';
  write_file(path, file_bytes(header, "x" + little_endian(0xC0490FDBu, 4)));
  SafetensorsFile file(path);
  CHECK(file.to_float("b") == std::vector<float>{-3.14159274f});
  CHECK(contains(error_of([&] { file.to_float("a"); }), "wanted F32, F16 or BF16, given U8"));
  CHECK(contains(error_of([&] { file.to_float("c"); }), "tensor \"c\" is missing"));
}

TEST_CASE("a file cut short at any byte is refused") {
  TemporaryDirectory directory;
  const std::vector<float> values = {1, 2, 3};
  AtomicFile output(directory / "whole");
  write_safetensors(output, {{"a", "b"}},
                    {{"x", FloatType::f32, {3}, &values}, {"y", FloatType::f16, {3}, &values}});
  output.commit();
  const std::string whole = read_file(directory / "whole");
  REQUIRE(open_error(directory, whole).empty());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO(size);
    CHECK_FALSE(open_error(directory, whole.substr(0, size)).empty());
  }
  CHECK(contains(open_error(directory, whole + '\0'), "1 unused bytes after the last tensor"));
}

TEST_CASE("a file that changes under the reader is refused") {
  TemporaryDirectory directory;
  const auto path = directory / "file";
  const std::vector<float> values(100'000, 1.0f);
  AtomicFile output(path);
  write_safetensors(output, {}, {{"x", FloatType::f32, {100'000}, &values}});
  output.commit();
  SafetensorsFile file(path);
  std::filesystem::resize_file(path, 200'000);
  CHECK(contains(error_of([&] { file.to_float("x"); }), "cannot be read"));
}

TEST_CASE("malformed headers are refused with what is wrong") {
  TemporaryDirectory directory;
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return R"({"x":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}}";
  };
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}";
  };
  const std::string huge = "9223372036854775808";
  const struct {
    std::string header;
    std::string wanted;
  } cases[] = {
      {"", "JSON object from its first byte"},
      {" {}", "JSON object from its first byte"},
      {"\xEF\xBB\xBF{}", "JSON object from its first byte"},
      {"[]", "JSON object from its first byte"},
      {"{", "not valid JSON"},
      {"{}x", "not valid JSON"},
      {std::string("{}\0x", 4), "NUL"},
      {"{\"\xFF\":1}", "not valid JSON"},
      {"{\"" + std::string(100'000, 'x'), "not valid JSON"},
      {"{\"a\":" + std::string(1'000'000, '['), "nested too deeply"},
      {"{\"a\":{\"b\":{\"c\":{\"d\":1}}}}", "nested too deeply"},
      {R"({"x":1,"x":1})", "key \"x\" is given twice"},
      {R"({"x":{"shape":[1],"shape":[2]}})", "key \"shape\" is given twice"},
      {R"({"__metadata__":[]})", "__metadata__: wanted an object"},
      {R"({"__metadata__":{"a":1}})", "\"a\": wanted a string"},
      {R"({"x":[]})", "tensor \"x\": wanted an object"},
      {R"({"a\nb":[]})", R"(tensor "a\nb")"},
      {"{\"" + std::string(5'000, 'x') + "\":[]}", "xxx...\": wanted an object"},
      {R"({"x":{"shape":[1],"data_offsets":[0,4]}})", "dtype: wanted a string"},
      {tensor("7", "[1]", "[0,4]"), "dtype: wanted a string"},
      {tensor("\"F31\"", "[1]", "[0,4]"), "unknown type \"F31\""},
      {R"({"x":{"dtype":"F32","data_offsets":[0,4]}})", "shape: wanted a list"},
      {tensor("\"F32\"", "4", "[0,4]"), "shape: wanted a list"},
      {tensor("\"F32\"", "[-1]", "[0,4]"), "given \"-1\""},
      {tensor("\"F32\"", "[1.0]", "[0,4]"), "given \"1.0\""},
      {tensor("\"F32\"", "[18446744073709551616]", "[0,4]"), "shape: wanted integers"},
      {tensor("\"F32\"", "[null]", "[0,4]"), "given \"null\""},
      {tensor("\"F32\"", "[" + huge + ",2,1]", "[0,4]"), "too large"},
      {tensor("\"F32\"", "[" + huge + "]", "[0,4]"), "too large"},
      {tensor("\"F32\"", "[4611686018427387905]", "[0,4]"), "too large"},  // * 4 wraps to 4
      {R"({"x":{"dtype":"F32","shape":[1]}})", "data_offsets: wanted a list"},
      {tensor("\"F32\"", "[1]", "[0]"), "wanted two numbers"},
      {tensor("\"F32\"", "[1]", "[0,2,4]"), "wanted two numbers"},
      {tensor("\"F32\"", "[1]", "[-4,0]"), "given \"-4\""},
      {tensor("\"F32\"", "[1]", "[4,0]"), "begin <= end <= 4"},
      {tensor("\"F32\"", "[1]", "[1,5]"), "begin <= end <= 4"},
      {tensor("\"F32\"", "[1]", "[18446744073709551612,18446744073709551615]"), "begin <= end"},
      {tensor("\"F32\"", "[1]", "[0,3]"), "wanted 4 bytes for F32 [1], given 3"},
      {tensor("\"F16\"", "[1]", "[0,4]"), "wanted 2 bytes for F16 [1], given 4"},
      {tensor("\"F16\"", "[1]", "[2,4]"), "2 unused bytes before tensor \"x\""},
      {tensor("\"F16\"", "[1]", "[0,2]"), "2 unused bytes after the last tensor"},
      {two("[0,2]", "[1,3]"), "\"b\" overlaps"},
      {two("[0,2]", "[0,2]"), "overlaps"},
      {two("[2,4]", "[1,3]"), "1 unused bytes before tensor \"b\""},
      {"{}", "4 unused bytes"},
  };
  for (const auto& [header, wanted] : cases) {
    const std::string message = open_error(directory, file_bytes(header, "1234"));
    INFO(header.substr(0, 200) << " -> " << message);
    CHECK(contains(message, wanted));
  }
  CHECK(open_error(directory, file_bytes(two("[2,4]", "[0,2]"), "1234")).empty());
  CHECK(open_error(directory, file_bytes(tensor("\"F32\"", "[]", "[0,4]"), "1234")).empty());
  CHECK(open_error(directory, file_bytes("{}", "")).empty());
}

TEST_CASE("absurd header lengths and files that are none are refused") {
  TemporaryDirectory directory;
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{1} << 32, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    CHECK(contains(open_error(directory, little_endian(length, 8) + "{}"),
                   "header length: wanted at most 2, given " + std::to_string(length)));
  }
  CHECK(contains(error_of([&] { SafetensorsFile file(directory / "missing"); }), "cannot be read"));
  CHECK(contains(error_of([&] { SafetensorsFile file(directory / "."); }), "not a regular file"));

  // Sparse, so that the length is inside the file.
  const auto path = directory / "sparse";
  write_file(path, little_endian(100'000'001, 8));
  std::filesystem::resize_file(path, 200'000'000);
  CHECK(contains(error_of([&] { SafetensorsFile file(path); }), "wanted at most 100000000"));
}

TEST_CASE("the writer refuses what it could not read back") {
  TemporaryDirectory directory;
  const std::vector<float> values = {1, 70000};
  const auto write = [&](const std::vector<OutputTensor>& tensors) {
    return error_of([&] {
      AtomicFile output(directory / "file");
      write_safetensors(output, {}, tensors);
      output.commit();
    });
  };
  CHECK(contains(write({{"x", FloatType::f16, {2}, &values}}), "does not fit F16"));
  CHECK(contains(write({{"x", FloatType::f32, {3}, &values}}), "shape [3], given 2"));
  CHECK(contains(write({{"__metadata__", FloatType::f32, {2}, &values}}), "taken"));
  CHECK(contains(write({{"x", FloatType::f32, {2}, &values}, {"x", FloatType::f32, {2}, &values}}),
                 "taken"));
  CHECK(directory.entries() == 0);
  CHECK(write({{"x", FloatType::bf16, {2}, &values}}).empty());
}

TEST_CASE("an AtomicFile appears whole or not at all") {
  TemporaryDirectory directory;
  const auto path = directory / "file";

  SECTION("without a commit nothing is left") {
    {
      AtomicFile file(path);
      file.write("half");
    }
    CHECK(directory.entries() == 0);
  }
  SECTION("what was there stays until the commit") {
    write_file(path, "old");
    {
      AtomicFile file(path);
      file.write("new");
      CHECK(read_file(path) == "old");
    }
    CHECK(read_file(path) == "old");
    AtomicFile file(path);
    file.write("new");
    file.commit();
    CHECK(read_file(path) == "new");
    CHECK(directory.entries() == 1);
  }
  SECTION("the temporary file of another program is left alone") {
    write_file(directory / "file.tmp0", "theirs");
    AtomicFile file(path);
    file.write("ours");
    file.commit();
    CHECK(read_file(directory / "file.tmp0") == "theirs");
    CHECK(read_file(path) == "ours");
  }
  SECTION("a symbolic link keeps pointing at the file") {
    write_file(directory / "real", "old");
    std::filesystem::create_symlink("real", path);
    AtomicFile file(path);
    file.write("new");
    file.commit();
    CHECK(std::filesystem::is_symlink(path));
    CHECK(read_file(directory / "real") == "new");
  }
  SECTION("a target that cannot be written is refused at once") {
    CHECK(contains(error_of([&] { AtomicFile file(directory / "no/file"); }), "cannot be written"));
    CHECK(contains(error_of([&] { AtomicFile file(directory / "."); }), "not a regular file"));
    CHECK(contains(error_of([&] { AtomicFile file("/dev/null"); }), "not a regular file"));
    CHECK(contains(error_of([&] { AtomicFile file(""); }), "given an empty one"));
    CHECK(directory.entries() == 0);
  }
  SECTION("a full disk is an error, also for the last bytes") {
    rlimit limit{};
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const rlimit small{1000, limit.rlim_max};
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::string on_commit = error_of([&] {
      AtomicFile file(path);
      file.write(std::string(1'001, 'x'));  // fits the buffer of the stream
      file.commit();
    });
    const std::string on_write = error_of([&] {
      AtomicFile file(path);
      file.write(std::string(1'000'000, 'x'));
    });
    setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, handler);
    CHECK(contains(on_commit, "cannot be written: File too large"));
    CHECK(contains(on_write, "cannot be written: File too large"));
    CHECK(directory.entries() == 0);
  }
}
