/// @file
/// Evaluations and sweeps for people, for programs, and as a figure.
#pragma once

#include <string>
#include <vector>

#include "evaluate.hpp"
#include "sweep.hpp"

namespace sinkstate::hybrid_lm {

std::string text(const Evaluation& evaluation);
std::string json(const Evaluation& evaluation);

/// A Markdown table, and below it the smallest memory that reaches some bars of drift.
std::string text(const std::vector<SweepRow>& rows);
std::string json(const std::vector<SweepRow>& rows);
/// An SVG.
std::string figure(const std::vector<SweepRow>& rows);

}  // namespace sinkstate::hybrid_lm
