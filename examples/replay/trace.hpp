/// @file
/// A trace: the inputs of real recurrences over some tokens, captured from any engine.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "safetensors.hpp"

namespace sinkstate::tools {

enum class Rule { mamba2, gated_delta, kimi_delta };

/// Which key head serves value head h: h / (value_heads / key_heads), or h % key_heads.
enum class HeadMap { interleaved, tiled };

/// The names that a trace file uses.
const char* to_string(Rule rule);
const char* to_string(HeadMap map);

/// How the sequences are stored in a file; states and directions are always F32.
struct TraceTypes {
  FloatType q = FloatType::f32;
  FloatType k = FloatType::f32;
  FloatType v = FloatType::f32;
  FloatType log_decay = FloatType::f32;
  FloatType beta = FloatType::f32;
};

struct Trace {
  Rule rule = Rule::mamba2;
  HeadMap head_map = HeadMap::interleaved;
  std::string source;  // where it was captured, for people

  std::ptrdiff_t tokens = 0;
  std::ptrdiff_t key_heads = 0;
  std::ptrdiff_t value_heads = 0;
  std::ptrdiff_t d_k = 0;
  std::ptrdiff_t d_v = 0;

  std::vector<float> q;          // [tokens, key_heads, d_k]
  std::vector<float> k;          // [tokens, key_heads, d_k]
  std::vector<float> v;          // [tokens, value_heads, d_v]
  std::vector<float> log_decay;  // [tokens, value_heads] or, per channel, [.., .., d_k]; <= 0
  std::vector<float> beta;       // [tokens, value_heads], the write strength

  // Empty when absent.
  std::vector<float> initial_state;   // [value_heads, d_k, d_v]
  std::vector<float> sink_direction;  // [value_heads, d_v]
  std::vector<float> state_end;       // [value_heads, d_k, d_v], the exact state at the end

  TraceTypes stored;
  std::vector<std::string> ignored;  // tensors of the file that are not part of a trace

  bool corrects() const { return rule != Rule::mamba2; }
  bool per_channel_decay() const { return rule == Rule::kimi_delta; }
  std::ptrdiff_t decays_per_token() const { return per_channel_decay() ? d_k : 1; }

  std::ptrdiff_t key_head(std::ptrdiff_t value_head) const {
    return head_map == HeadMap::interleaved ? value_head / (value_heads / key_heads)
                                            : value_head % key_heads;
  }

  /// Token t as value head h sees it: rows of d_k, d_k, d_v and decays_per_token() numbers.
  const float* query(std::ptrdiff_t t, std::ptrdiff_t h) const { return key_row(q, t, h); }
  const float* key(std::ptrdiff_t t, std::ptrdiff_t h) const { return key_row(k, t, h); }
  const float* value(std::ptrdiff_t t, std::ptrdiff_t h) const {
    return v.data() + (t * value_heads + h) * d_v;
  }
  const float* log_decays(std::ptrdiff_t t, std::ptrdiff_t h) const {
    return log_decay.data() + (t * value_heads + h) * decays_per_token();
  }
  float write_strength(std::ptrdiff_t t, std::ptrdiff_t h) const {
    return *(beta.data() + (t * value_heads + h));
  }

 private:
  const float* key_row(const std::vector<float>& rows, std::ptrdiff_t t, std::ptrdiff_t h) const {
    return rows.data() + (t * key_heads + key_head(h)) * d_k;
  }
};

/// Reads and checks a trace: no tensor missing, shapes that agree, every number finite (-inf is a
/// log decay), log decays at most 0. Throws a ToolError otherwise. Unknown tensors are `ignored`.
Trace load_trace(const std::filesystem::path& path);

/// Writes `trace` in the types that it is stored in. Throws a ToolError when a vector does not fill
/// its shape or the file cannot be written; checks no values.
void save_trace(const std::filesystem::path& path, const Trace& trace);
/// The same to a file that was opened before; the caller commits.
void save_trace(AtomicFile& file, const Trace& trace);

/// The first `tokens` tokens of some value heads with the key heads that they read, without
/// state_end. Throws a ToolError for tokens or heads that the trace does not have.
Trace cut(const Trace& trace, std::ptrdiff_t tokens, const std::vector<std::ptrdiff_t>& heads);

}  // namespace sinkstate::tools
