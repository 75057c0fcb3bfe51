/// @file
/// What `replay` says: a table for people, JSON for programs, a bar while one waits.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "profile.hpp"
#include "replay.hpp"

namespace sinkstate::tools {

/// One row a head and one a trace, as text with a legend.
std::string table(const std::vector<TraceReport>& reports, const ReplayOptions& options);

/// The object of docs/traces.md, section "The report"; of "The profile" too, if there are profiles,
/// one a report.
std::string json(const std::vector<TraceReport>& reports, const ReplayOptions& options,
                 const std::vector<TraceProfile>& profiles = {});

/// Rank and output error over the tokens, as SVG: for each trace two charts with a line a head.
/// Reports must hold their series. Equal parts of a long trace are drawn as one point. If there are
/// profiles, one a report, each brings charts of its own.
std::string figure(const std::vector<TraceReport>& reports, const ReplayOptions& options,
                   const std::vector<TraceProfile>& profiles = {});

/// The trace file without folder and extension.
std::string name_of(const TraceReport& report);

/// One line on stderr in a program's name, whatever bytes a file name in it has.
void say(const char* program, std::string line);

/// A bar on a terminal; nothing elsewhere.
class Progress {
 public:
  Progress(std::FILE* stream, std::ptrdiff_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// From any thread.
  void add(std::ptrdiff_t count);

 private:
  std::FILE* stream_;
  bool visible_;
  std::ptrdiff_t total_;
  std::ptrdiff_t done_ = 0;
  std::chrono::steady_clock::time_point drawn_;
  std::mutex mutex_;
};

}  // namespace sinkstate::tools
