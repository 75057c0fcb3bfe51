// A sum over a block as CUB names it.
#pragma once

#include "../../cuda_runtime.h"

namespace cub {

template <class T, int Threads>
class BlockScan {
 public:
  struct TempStorage {
    T numbers[Threads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T number, T& before, T& all) {
    storage_.numbers[threadIdx.x] = number;
    __syncthreads();
    all = 0;
    for (unsigned i = 0; i < Threads; ++i) {
      if (i == threadIdx.x) before = all;
      all += storage_.numbers[i];
    }
    __syncthreads();
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
