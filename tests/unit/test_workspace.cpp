// A walk over memory: first counted, then carved.
#include <cstdint>
#include <sinkstate/core/workspace.hpp>

#include "support/catch.hpp"

using namespace sinkstate;

TEST_CASE("workspace: counting and carving take the same room, each piece aligned", "[workspace]") {
  alignas(64) unsigned char bytes[512];
  const auto walk = [](Workspace& memory) {
    memory.take<float>(1);
    memory.take<std::uint8_t>(65);
    memory.take<double>(0);
    return memory.take<double>(8);
  };
  Workspace count;
  CHECK(walk(count) == nullptr);
  CHECK(count.used() == 64 + 128 + 0 + 64);
  Workspace memory(bytes, sizeof bytes);
  CHECK(reinterpret_cast<unsigned char*>(walk(memory)) == bytes + 192);
  CHECK(memory.used() == count.used());
  CHECK_FALSE(memory.exhausted());
}

TEST_CASE("workspace: a piece that would end behind the memory is none", "[workspace]") {
  alignas(64) unsigned char bytes[128];
  Workspace memory(bytes, sizeof bytes);
  CHECK(memory.take<float>(16) != nullptr);
  CHECK(memory.take<float>(17) == nullptr);
  CHECK(memory.exhausted());
  Workspace exact(bytes, sizeof bytes);
  CHECK(exact.take<float>(32) != nullptr);
  CHECK_FALSE(exact.exhausted());
  const MatrixView<float> rows = Workspace(bytes, sizeof bytes).take_matrix<float>(2, 3);
  CHECK(rows.stride == 16);
  CHECK(rows.row(1) == rows.data + 16);
}
