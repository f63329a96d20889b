// What device.h asks of the machine (machine.cpp) and of its units (units.cpp). No standard header: every kernel includes this.
#pragma once

namespace emulator {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct Dim {
  u32 x, y, z;
};

[[noreturn]] void fail(int line, const char* format, ...) __attribute__((format(printf, 2, 3)));

// What lanes do together: each brings something, `run` is called once all lanes of the mask have come.
typedef void Together(void* const* brought, u32 mask);
void meet(int line, const char* what, u32 mask, void* mine, Together* run);
void nothing(void* const*, u32);

void block_barrier(int line, int id, int n_thread);  // n_thread 0: all that have not returned
void cluster_arrive(int line);
void cluster_wait(int line);  // until all threads of the cluster have arrived
u32 address_in_cluster(u32 address, u32 block, int line);
void pause(int line);       // somebody else runs: for loops that wait for memory
void interleave(int line);  // somebody else may run: where the order in which threads touch memory matters
i64 clock();

u32 shared_address(const void* p, int line);
u8* shared_at(u32 address, u32 n_bytes, u32 align, int line);
void* dynamic_shared(u32 align);
void* static_shared(int id, u32 n_bytes, u32 align);  // of the block, one for each declaration

// ---- units

struct Exchange {
  u64 value, got;
  int from;
};
Together exchange;

struct Vote {
  u32 value, got;
};
Together ballot, sum_signed, least_signed, most_signed;

float f32_of_f16(u16 x);
u16 f16_of_f32(float x);
u16 bf16_of_f32(float x);

struct Product {  // m16n8k16
  u32 a[4], b[2];
  float d[4];  // the sums before and after
};
Together product_f16, product_bf16, product_tf32;  // tf32: m16n8k8

struct Whole {  // m16n8k32 of bytes
  u32 a[4], b[2];
  int d[4];
};
Together product_u8_s8, product_s8_s8;

struct Matrices {  // four of 8 x 8 f16
  u32 address, got[4];
  int line;
};
Together matrices, matrices_turned;

void copy_async(u32 to, const void* from, u32 n_bytes, u32 n_real, int line);
void copies_commit();
void copies_wait(int n_left);

void message_init(u32 barrier, u32 arrivals, int line);
void message_expect(u32 barrier, u32 n_bytes, int line);
void message_arrive(u32 barrier, u32 n_bytes, int line);
void message_arrive_in_cluster(u32 barrier, int line);  // at an address in the cluster
void message_wait(u32 barrier, u32 parity, int line);
void copy_bulk(u32 to, const void* from, u32 n_bytes, u32 barrier, int line);
void copy_bulk_to_all(u32 to, const void* from, u32 n_bytes, u32 barrier, u32 blocks, int line);  // a bit for each of the cluster's
void send(u32 to, const void* x, u32 n_bytes, u32 barrier, int line);  // to addresses in the cluster

struct Warpgroup {  // one product of m64 n k16: a warp's 16 rows of it
  float* const* sums;  // n / 2
  int n, line;
  u32 a[4];
  u64 b;
};
Together warpgroup_product, warpgroup_fence, warpgroup_commit;
void warpgroup_wait(int n_left, int line);

}  // namespace emulator
