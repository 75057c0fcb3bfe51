#include <sinkstate/config.hpp>
