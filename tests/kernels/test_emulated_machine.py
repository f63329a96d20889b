"""The emulated machine itself: right kernels run in any order, and each kind of wrong kernel is found out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulated import machine
from emulated.machine import EmulatedKernel, EmulationError, emulate_text, needs_compiler, order
from emulated.translate import split, translated
from torch import Tensor

pytestmark = needs_compiler
SEEDS = range(3)


def kernel(body: str, threads: int = 64, before: str = "") -> EmulatedKernel:
    """A kernel of a float array and an int array."""
    head = f'extern "C" __global__ void __launch_bounds__({threads})\n    f(float* x, int* y, int n) {{'
    return emulate_text(f"{before}\n{head}\n{body}\n}}").kernel("f", "ppi")


def run(
    body: str, n: int = 64, *, grid: int = 1, threads: int = 64, shared: int = 0, before: str = ""
) -> tuple[Tensor, Tensor]:
    x, y = torch.full((n,), torch.nan), torch.zeros(n, dtype=torch.int32)
    made = kernel(body, threads, before).allow_shared(shared)
    made.launch((grid,), threads, (x, y, np.int32(n)), shared)
    return x, y


def message(body: str, n: int = 64, **how: object) -> str:
    with pytest.raises(EmulationError) as caught:
        run(body, n, **how)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.fixture(params=SEEDS, autouse=True)
def _every_order(request: pytest.FixtureRequest) -> None:
    order.seed, order.n_launch, order.resident = request.param, 0, 0


def test_threads_of_all_blocks_run() -> None:
    _, y = run(
        "y[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x * 1000 + threadIdx.x;", 320, grid=5
    )
    assert y.tolist() == [1000 * b + t for b in range(5) for t in range(64)]


def test_a_library_is_kept_for_later_runs_and_another_text_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_folder", lambda: tmp_path)
    compiled: list[Path] = []

    def kept(text: str) -> Path:
        def build(path: Path) -> None:
            compiled.append(path)
            path.write_text(text)

        return machine._library("kept", text, build)

    one = kept("one")
    assert kept("one") == one and len(compiled) == 1
    other = kept("other")
    assert other != one and len(compiled) == 2 and one.read_text() == "one"
    monkeypatch.setattr(machine, "_compiler", lambda: "another compiler")
    assert kept("one") != one and len(compiled) == 3 and len(list(tmp_path.iterdir())) == 3


def test_shuffles_votes_and_reductions_are_those_of_a_warp() -> None:
    body = """
      const int lane = threadIdx.x % 32;
      int v = __shfl_xor_sync(~0u, lane, 5) + 100 * __shfl_up_sync(~0u, lane, 3) + 10000 * __shfl_sync(~0u, lane, 7);
      if (lane < 16) v += 1000000 * __shfl_down_sync(0xffffu, lane, 1, 16);
      y[threadIdx.x] = v + (__ballot_sync(~0u, lane & 1) == 0xaaaaaaaau) + __reduce_add_sync(~0u, lane) +
                       __reduce_max_sync(~0u, -lane) + __reduce_min_sync(~0u, -lane);"""
    _, y = run(body)

    def want(t: int) -> int:
        lane = t % 32
        v = (lane ^ 5) + 100 * (lane - 3 if lane >= 3 else lane) + 70000 + 1 + 496 + 0 - 31
        return v + (1000000 * min(lane + 1, 15) if lane < 16 else 0)

    assert y.tolist() == [want(t) for t in range(64)]


def test_barriers_order_what_warps_do() -> None:
    body = """
      __shared__ float a[64], b[64];
      for (int i = 0; i < 5; ++i) {
        a[threadIdx.x] = threadIdx.x + i;
        __syncthreads();
        b[threadIdx.x] = a[63 - threadIdx.x];
        __syncthreads();
      }
      x[threadIdx.x] = b[threadIdx.x];"""
    x, _ = run(body)
    assert x.tolist() == [63.0 - t + 4 for t in range(64)]


def test_a_barrier_that_is_missing_shows_in_some_order() -> None:
    body = """
      __shared__ float a[64];
      a[threadIdx.x] = threadIdx.x;
      x[threadIdx.x] = a[(threadIdx.x + 32) % 64];"""
    assert run(body)[0].isnan().any()  # the first thread reads unwritten memory


def test_threads_that_have_returned_are_not_waited_for() -> None:
    x, _ = run("if (threadIdx.x < 32) return; __syncthreads(); x[threadIdx.x] = 1;")
    assert x[:32].isnan().all() and (x[32:] == 1).all()


COPIES = """
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ void wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_comes_when_it_is_waited_for_and_not_before(waits: bool) -> None:
    body = f"""
      __shared__ __align__(16) int a[64];
      y[threadIdx.x] = threadIdx.x;
      __syncthreads();
      if (threadIdx.x < 16) {{ copy(a + 4 * threadIdx.x, y + 4 * threadIdx.x); {"wait();" if waits else ""} }}
      __syncthreads();
      x[threadIdx.x] = a[threadIdx.x];"""
    x, _ = run(body, before=COPIES)
    assert x.tolist() == [float(t) if waits else -1.0 for t in range(64)]


BARRIERS = """
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(unsigned b, unsigned n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
__device__ void expect(unsigned b, unsigned n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory");
}
"""
BULK = (
    BARRIERS
    + """
__device__ void bulk(unsigned to, const void* from, unsigned n, unsigned b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(n), "r"(b) : "memory");
}
__device__ void wait(unsigned b, unsigned parity) {
  asm volatile("{\\n.reg .pred done;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               "@!done bra again;\\n}\\n" ::"r"(b), "r"(parity) : "memory");
}
"""
)


def bulk_copy(waits: bool = True, expects: int = 256, copies: int = 256) -> str:
    return f"""
      __shared__ __align__(128) int a[64];
      __shared__ unsigned long long barrier;
      y[threadIdx.x] = threadIdx.x;
      if (threadIdx.x == 0) init(address(&barrier), 1);
      __syncthreads();
      if (threadIdx.x == 0) expect(address(&barrier), {expects}), bulk(address(a), y, {copies}, address(&barrier));
      {"wait(address(&barrier), 0);" if waits else ""}
      __syncthreads();
      x[threadIdx.x] = a[threadIdx.x];
      wait(address(&barrier), 0);"""


def test_bulk_copies_complete_on_their_barrier() -> None:
    assert run(bulk_copy(), before=BULK)[0].tolist() == list(map(float, range(64)))
    assert "deadlock" in message(bulk_copy(expects=272), before=BULK)
    assert "multiple of 16" in message(
        bulk_copy().replace("address(a),", "address(a) + 4,"), before=BULK
    )


def test_a_bulk_copy_that_is_not_waited_for_may_come_later() -> None:
    found = []
    for order.seed in range(10):
        found.append(run(bulk_copy(waits=False), before=BULK)[0].tolist() == list(map(float, range(64))))
    assert not all(found)


def test_accesses_outside_of_the_tensors_are_found() -> None:
    assert "touches byte 256 of argument 0, which has 256" in message("x[threadIdx.x + 1] = 0;")
    assert "touches byte 256 of argument 1" in message("x[threadIdx.x] = y[threadIdx.x + 1];")
    assert "touches byte 8192 of argument 0" in message("x[2048] = 0;", n=1024)
    assert "wrote 4 bytes before argument 0" in message("if (threadIdx.x == 0) x[-1] = 0;", n=80)
    assert "touches memory that is no argument's" in message("*(int*)16 = 1;")


def test_a_tensor_of_odd_length_is_guarded_to_the_byte() -> None:
    assert "wrote at byte 240 of argument 0" in message(
        "if (threadIdx.x < 61) x[threadIdx.x] = 0;", n=60
    )


def test_parts_of_one_tensor_are_guarded_each_for_itself() -> None:
    whole = torch.zeros(192)
    made = emulate_text(
        'extern "C" __global__ void __launch_bounds__(32) f(float* a, float* b) { a[0] = 1; b[threadIdx.x * 3] = 2; }'
    ).kernel("f", "pp")
    made.launch((1,), 32, (whole[64:65], whole[70:164:3]))
    assert whole[64] == 1 and whole[70:164:3].eq(2).all() and whole.count_nonzero() == 33
    with pytest.raises(EmulationError, match="byte 372 of argument 1, which has 364"):
        made.launch((1,), 32, (whole[64:65], whole[70:161]))


def test_shared_memory_has_the_size_that_was_asked_for() -> None:
    body = "extern __shared__ int a[];\na[threadIdx.x] = 1;"
    run(body, shared=256)
    assert "outside the 128 bytes" in message(body, shared=128)
    assert "beside its declared variables" in message(
        "__shared__ int a[8], b; a[threadIdx.x % 9] = b = 1;"
    )
    with pytest.raises(EmulationError, match="49168 bytes"):
        kernel(body).launch((1,), 64, (torch.zeros(1), torch.zeros(1), np.int32(0)), 49168)


def test_deadlocks_name_who_waits_where() -> None:
    text = message("if (threadIdx.x < 32)\n__syncwarp(); else\n__shfl_sync(~0u, 1, threadIdx.x % 32 < 31 ? 0 : 1);\n"
                   'if (threadIdx.x < 40) asm volatile("bar.sync 1, 64;");')  # fmt: skip
    assert "asm volatile" in text.splitlines()[-1]
    assert "deadlock" in text and "40 threads from 0 in a barrier of the block" in text
    assert "waits for memory that nobody writes" in message(
        "while (atomicAdd(y, 0) == 0) __nanosleep(10);"
    )


def test_warps_that_diverge_where_they_must_meet_are_found() -> None:
    text = message("if (threadIdx.x % 2)\n__syncwarp();\nelse\n__syncwarp();")
    assert "diverges" in text and "__syncwarp();" in text.splitlines()[-1]
    text = message("if (threadIdx.x == 3) return;\ny[0] = __shfl_sync(~0u, 1, 0);")
    assert "returned" in text or "returns while others" in text
    assert "without itself" in message("__syncwarp(0xffff);")


def test_launches_with_wrong_threads_or_arguments_are_refused() -> None:
    made = kernel("x[0] = n;", threads=32)
    with pytest.raises(EmulationError, match="64 threads"):
        made.launch((1,), 64, (torch.zeros(1), torch.zeros(1), np.int32(0)))
    with pytest.raises(EmulationError, match="arguments of"):
        made.code.kernel("f", "ppl")
    with pytest.raises(AssertionError, match="for 'i'"):
        made.launch((1,), 32, (torch.zeros(1), torch.zeros(1), np.int64(0)))


def test_a_machine_that_stopped_in_the_middle_runs_again() -> None:
    assert "deadlock" in message(
        'if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;"); else __syncthreads();'
    )
    test_barriers_order_what_warps_do()


@pytest.mark.slow
def test_blocks_that_wait_for_each_other_must_be_resident_together() -> None:
    body = """
      if (threadIdx.x == 0) {
        atomicAdd(y, 1);
        while (atomicAdd(y, 0) < 3) __nanosleep(10);
      }"""
    order.resident = 3
    assert run(body, grid=3)[1][0] == 3
    order.resident = 2
    assert "nobody writes" in message(body, grid=3)


CLUSTER = (
    BARRIERS
    + """
__device__ void wait(unsigned b, unsigned parity) {
  asm volatile("{\\n.reg .pred done;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               "@!done bra again;\\n}\\n" ::"r"(b), "r"(parity) : "memory");
}
__device__ void arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ void meet() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ void send(unsigned to, float x, unsigned barrier, unsigned peer) {
  unsigned there, counts;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(to), "r"(peer));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counts) : "r"(barrier), "r"(peer));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(there), "f"(x),
               "r"(counts) : "memory");
}
"""
)


def clustered(
    meets: str = "arrive(); meet();", waits: str = "wait(address(&barrier), 0);"
) -> EmulatedKernel:
    """Clusters of 3 blocks along x; each sends its number to all, which write the numbers they got."""
    return emulate_text(f"""{CLUSTER}
      extern "C" __global__ void __cluster_dims__(3, 1, 1) __launch_bounds__(64) f(float* x) {{
        __shared__ float came[3];
        __shared__ unsigned long long barrier;
        if (threadIdx.x == 0) init(address(&barrier), 1), expect(address(&barrier), 12);
        {meets}
        if (threadIdx.x < 3) send(address(&came[blockIdx.x % 3]), blockIdx.x + 1, address(&barrier), threadIdx.x);
        {waits}
        if (threadIdx.x < 3) x[blockIdx.x * 3 + threadIdx.x] = came[threadIdx.x];
      }}""").kernel("f", "p")


def test_blocks_of_a_cluster_send_to_each_other() -> None:
    x = torch.full((9, 3), torch.nan)
    clustered().launch((9,), 64, (x,))
    assert x.tolist() == [[i // 3 * 3.0 + 1 + k for k in range(3)] for i in range(9)]
    with pytest.raises(EmulationError, match="no whole number of clusters"):
        clustered().launch((8,), 64, (x,))


def shared_rows(mask: str = "3", arrivals: int = 2) -> EmulatedKernel:
    """Clusters of two blocks, each of which copies its half of 16 numbers to both, twice: the second time when both have read the first."""
    return emulate_text(f"""{CLUSTER}
      __device__ void to_all(unsigned to, const float* from, unsigned barrier, unsigned short blocks) {{
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                     "l"(from), "r"(32), "r"(barrier), "h"(blocks) : "memory");
      }}
      __device__ void arrive_at(unsigned barrier, unsigned peer) {{
        unsigned there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(peer));
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
      }}
      extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64) f(const float* x, float* y) {{
        __shared__ __align__(128) float came[16];
        __shared__ unsigned long long full, read;
        const int half = blockIdx.x % 2 * 8;
        if (threadIdx.x == 0) init(address(&full), 1), init(address(&read), {arrivals});
        arrive(); meet();
        for (int turn = 0; turn < 2; ++turn) {{
          if (threadIdx.x == 0) {{
            if (turn > 0) wait(address(&read), 0);
            expect(address(&full), 64);
            to_all(address(&came[half]), x + turn * 16 + half, address(&full), {mask});
          }}
          wait(address(&full), turn);
          if (threadIdx.x < 16) y[(blockIdx.x * 2 + turn) * 16 + threadIdx.x] = came[threadIdx.x];
          __syncthreads();
          if (threadIdx.x < 2 && turn == 0) arrive_at(address(&read), threadIdx.x);
        }}
        arrive(); meet();
      }}""").kernel("f", "pp")


def test_blocks_of_a_cluster_share_what_each_copies_a_part_of() -> None:
    x, y = torch.arange(32.0), torch.full((4, 2, 16), torch.nan)
    for order.seed in range(10):
        shared_rows().launch((4,), 64, (x, y))
        assert torch.equal(y, x.view(2, 16).expand(4, 2, 16))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"mask": "7"}, "no blocks 7"),
        ({"mask": "1"}, "deadlock|bytes missing|has ended"),
        ({"arrivals": 3}, "deadlock"),
    ],
)
def test_copies_to_a_cluster_that_do_not_fit_are_found(how: dict[str, str | int], says: str) -> None:
    with pytest.raises(EmulationError, match=says):
        for order.seed in range(10):
            shared_rows(**how).launch((4,), 64, (torch.arange(32.0), torch.full((4, 2, 16), torch.nan)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"meets": "__syncthreads();"}, "not made its barrier yet"),
        ({"meets": "arrive(); __syncthreads();"}, "not waited for its cluster|not made its barrier yet"),
        ({"meets": "meet();"}, "did not arrive"),
        ({"meets": "__syncthreads(); if (blockIdx.x) arrive(), meet();"}, "deadlock|not made its barrier yet"),
        ({"waits": ""}, "under way|has ended"),
    ],
)  # fmt: skip
def test_clusters_whose_blocks_do_not_wait_are_found(how: dict[str, str], says: str) -> None:
    with pytest.raises(EmulationError, match=says):
        for order.seed in range(10):
            clustered(**how).launch((9,), 64, (torch.zeros(27),))


def test_products_of_matrices_are_those_of_mma_and_ldmatrix() -> None:
    """a [16, 16] and b [8, 16], both from shared memory by ldmatrix, as f16 and as bf16."""
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        text = f"""
          extern "C" __global__ void __launch_bounds__(32) f(const unsigned short* a, const unsigned short* b, float* out) {{
            __shared__ __align__(16) unsigned short s[24 * 16];
            const int lane = threadIdx.x;
            for (int i = lane; i < 256; i += 32) s[i] = a[i];
            for (int i = lane; i < 128; i += 32) s[256 + i] = b[i];
            __syncwarp();
            unsigned x[4], y[4];
            const unsigned base = (unsigned)__cvta_generic_to_shared(s);
            const unsigned at = base + (lane % 16) * 32 + lane / 16 * 16, bt = base + 512 + lane % 8 * 32 + lane / 8 % 2 * 16;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0,%1,%2,%3}}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0,%1,%2,%3}}, [%4];"
                         : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"(bt));
            float d[4] = {{1.f, 1.f, 1.f, 1.f}};
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%0,%1,%2,%3}},{{%4,%5,%6,%7}},{{%8,%9}},"
                         "{{%0,%1,%2,%3}};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
            for (int i = 0; i < 4; ++i) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
          }}"""
        a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
        out = torch.full((16, 8), torch.nan)
        emulate_text(text).kernel("f", "ppp").launch((1,), 32, (a, b, out))
        assert torch.allclose(out.double(), 1 + a.double() @ b.double().T, rtol=1e-6, atol=1e-6)


def test_numbers_are_rounded_to_nearest_even() -> None:
    text = """
      extern "C" __global__ void __launch_bounds__(32) f(const float* x, unsigned short* half, unsigned short* brain, float* back,
                                                         int n) {
        for (int i = threadIdx.x; i < n; i += 32) {
          asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half[i]) : "f"(x[i]));
          asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(brain[i]) : "f"(x[i]));
          asm("cvt.f32.f16 %0, %1;" : "=f"(back[i]) : "h"(half[i]));
        }
      }"""
    bits = torch.randint(-(2**31), 2**31, (4000,), dtype=torch.int64).to(torch.int32)
    special = torch.tensor(
        [0.0, -0.0, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -torch.inf]
    )
    near = torch.randn(4000) * 2.0 ** torch.randint(-28, 17, (4000,))
    x = torch.cat([bits.view(torch.float32).nan_to_num(1.0), special, near])
    half, brain, back = torch.zeros(len(x)).half(), torch.zeros(len(x)).bfloat16(), torch.zeros(len(x))
    emulate_text(text).kernel("f", "ppppi").launch((1,), 32, (x, half, brain, back, np.int32(len(x))))
    assert torch.equal(half, x.half())
    assert torch.equal(brain, x.bfloat16())
    assert torch.equal(back, x.half().float())


def test_texts_are_rewritten_line_by_line() -> None:
    assert split('a(b, c), "d,e", f') == ["a(b, c)", '"d,e"', "f"]
    text = translated(
        'asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1],\\n"\n " 16, %2;" ::"r"(a + 1), "l"(b), "r"(c ? 1 : 2));'
    )
    assert text.strip() == "ptx_cp_async_cg_shared_global(__LINE__, (a + 1), (b), 16, (c ? 1 : 2))\n;"
    with pytest.raises(ValueError, match="several instructions"):
        translated('asm("a %0; b %0;" : "=r"(x));')
