//! The table of the mutants, with the files and texts of lines that it names.

use cuda_std::atomic::Scope;
use devcomm::sim::Change::{self, NoWait, Relax, Remove};

use super::Mutant;

const LSA: &str = "kernels/src/lsa_allreduce.rs";
const RMSNORM: &str = "examples/kernels/src/rmsnorm_allreduce.rs";
const PUT_SIGNAL: &str = "kernels/src/gin_put_signal.rs";
const GIN_A2A: &str = "examples/kernels/src/gin_alltoall.rs";
const HYBRID: &str = "examples/kernels/src/hybrid_allreduce.rs";
const HYBRID_A2A: &str = "examples/kernels/src/hybrid_alltoall.rs";
const LAMPORT: &str = "kernels/src/collectives/lamport_allreduce.rs";
const PUSH: &str = "kernels/src/collectives/push_allreduce.rs";
const PUSH_X: &str = "kernels/src/collectives/push_exchange.rs";
const PULL: &str = "kernels/src/collectives/pull_reduce_scatter.rs";
const LL: &str = "examples/kernels/src/ll_alltoall.rs";
const NUMBERS: &str = "crates/nccl_device/tests/kernels/src/numbers.rs";
const LAMPORT_X: &str = "kernels/src/collectives/lamport_exchange.rs";
const MARKS: &str = "kernels/src/collectives/marks.rs";
pub const ONE_STEP: &str = "kernels/src/collectives/one_step.rs";
/// The kernels that use the code in `ONE_STEP`.
pub const USERS_OF_ONE_STEP: [&str; 3] = [LAMPORT_X, MARKS, LAMPORT_RS];
const LAMPORT_XV: &str = "kernels/src/collectives/lamport_exchange_v.rs";
const LAMPORT_RS: &str = "kernels/src/collectives/lamport_reduce_scatter.rs";
const LAMPORT_RMS: &str = "kernels/src/collectives/lamport_rmsnorm.rs";
const PUSH_XV: &str = "kernels/src/collectives/push_exchange_v.rs";
pub const EP_DISPATCH: &str = "kernels/src/expert_parallel/ep_dispatch.rs";
pub const EP_DISPATCH_PARTS: &str = "kernels/src/expert_parallel/ep_dispatch/dispatch_parts.rs";
const EP_LAYOUT: &str = "kernels/src/expert_parallel/ep_layout.rs";
pub const EP_COMBINE: &str = "kernels/src/expert_parallel/ep_combine.rs";
pub const EP_COMBINE_PARTS: &str = "kernels/src/expert_parallel/ep_combine/combine_parts.rs";
const EP_COUNTERS: &str = "kernels/src/expert_parallel/counters.rs";
const EP_PLACES: &str = "kernels/src/expert_parallel/places.rs";
const DISPATCH_COUNTED: &str = "kernels/src/expert_parallel/ep_dispatch_counted.rs";
const COMBINE_COUNTED: &str = "kernels/src/expert_parallel/ep_combine_counted.rs";
pub const EP_RAIL: &str = "kernels/src/expert_parallel/rail.rs";
pub const DISPATCH_TEAMS: &str = "kernels/src/expert_parallel/ep_dispatch_hybrid.rs";
const COMBINE_TEAMS: &str = "kernels/src/expert_parallel/ep_combine_hybrid.rs";
const BLOCKS: &str = "kernels/src/gemm/gemm_blocks.rs";
pub const MAINLOOP: &str = "crates/cuda_std/src/tile/mainloop.rs";
pub const WARPGROUP: &str = "crates/cuda_std/src/tile/warpgroup.rs";
pub const WGMMA: &str = "kernels/src/gemm/gemm_wgmma.rs";
const FACTORS: &str = "kernels/src/gemm/factors.rs";
pub const STORES: &str = "kernels/src/gemm/stores.rs";
pub const LAST_ROWS: &str = "crates/cuda_std/src/tile/last_rows.rs";
pub const SWAPPED_TILES: &str = "kernels/src/gemm/swapped_tiles.rs";
pub const SWAPPED_STORES: &str = "kernels/src/gemm/swapped_stores.rs";
pub const SWAPPED: &str = "kernels/src/gemm/swapped_loop.rs";
/// The kernels that use the code in `MAINLOOP`.
pub const USERS_OF_MAINLOOP: [&str; 7] =
    [WGMMA, FACTORS, LAST_ROWS, BLOCKS, SWAPPED, SWAPPED_TILES, GROUPED];
const SLICES: &str = "kernels/src/gemm/slices.rs";
const GROUPED: &str = "kernels/src/gemm/gemm_grouped_swapped.rs";
const MMA: &str = "kernels/src/gemm/gemm_mma.rs";
pub const FUSED: &str = "kernels/src/gemm_allreduce/exchange.rs";
pub const OWNER: &str = "kernels/src/gemm_allreduce/exchange/owner.rs";
const WIDE: &str = "kernels/src/gemm_allreduce/gemm_allreduce_wide.rs";
const GATHER: &str = "kernels/src/allgather_gemm.rs";
const FEW: &str = "docs/guide/kernels/src/few.rs";
pub const GUIDE_WIDE: &str = "docs/guide/kernels/src/wide.rs";

// Texts of lines with the operations that mutants change, or with the accesses that are wrong then.
const SPLIT: [&str; 2] = ["self.memory.send(", "let sent = "];
const ADD_IN_REGISTERS: &str = "peers.add(";
const STORE_TRANSPOSED: &str = "group.store_transposed(";
const ENTRY: &str = "barrier.sync(MemoryOrder::Acquire";
const EXIT: &str = "barrier.sync(MemoryOrder::Release";
const LSA_BARRIER: &str = "barrier.lsa().sync(";
const ROUND: &str = "barrier.sync(MemoryOrder::AcqRel)";
const FOLLOW: &str = "gin.wait_signal_follow_shadow(";
const FLUSH: &str = "gin.flush(";
const PUT: &str = "put.signal(arrived";
const LOAD: &str = "from.load_vec(at)";
const STORE: &str = "to.store_vec(at, sum)";
const SUM: &str = "mem::load_vec(from(i)";
const STORE_SUM: &str = "mem::store_vec(to(j)";
const ROWS: &str = "rows.each(weight";
const PUSHED: &str = "mem::store_vec(to.wrapping_add(";
const RECEIVED: &str = "mem::load_vec(from)";
const GATHERED: &str = "mem::store_vec(message.into";
const PULLED: &str = "parts[distance].load_vec(";
const ROW: &str = "part.store";
const TEAMS: &str = "experts_in_teams";
const DISPATCHES: &str = "dispatches_in_teams";
const COMBINES: &str = "combines_in_teams";
const COUNTED: &str = "experts_counted";
const TELL_COUNTS: &str = "progress.tell(Step::Counted)";
const COUNTS_STORED: &str = "to.store(i";
const COUNTS_LOADED: &str = "counts.load(";
const SENT: &str = "progress.tell_by_last_block(Step::Sent)";
const RETURNED: &str = "progress.tell_by_last_block(Step::Returned)";
const SYNC: &str = "thread::sync_threads()";
const MEETS: &str = "wait_signal_meets_shadow(";
const FULL: &str = "pipeline.wait_full(";
const EMPTY: &str = "pipeline.wait_empty(";
const MULTIPLY: &str = "wgmma::multiply(";
const PRODUCT: &str = "group.multiply(";
const SUMS: &str = "wgmma::wait_groups::<0>()";
const READ: &str = "tma::wait_stores_read::<0>()";
const FENCE: &str = "tma::fence_async_shared()";
const STAGED: &str = "store_words(";
const ARRIVED: &str = "arrived.fetch_add(";
const SLICE: &str = "mem::load_vec(place(slice, eight)";
const PARTIAL: &str = "mem::load_vec(from.add(source * stride";
const SCALES: &str = "mem::load(scales.add(source * stride";
const FLAG: &str = "self.flag(strip, source).get()";

const PUSHED_ROWS: &str = "exchange.push(";
const ARRIVAL: &str = "exchange.has_arrived(";
const BANK: &str = "arrived().add(1)";

const SEND: &str = "session.send(";
const REDUCED: &str = "buffer.all_reduce(";
const BLOCK_REDUCE: &str = "block_reduce(";
const LOAD_TRANSPOSED: &str = "x.transposed().load(";
const IN_SESSION: &str = "session.all_reduce(";
const RECEIVE: &str = "session.receive(";
const RECEIVE_IN_ORDER: &str = "session.receive_in_order(";
const WAIT: &str = "wait_until(";
const SEND_ROW: &str = "session.rows.send(";
const PEEK_ROW: &str = "session.rows.peek(";
const RECEIVE_ROWS: &str = "session.rows.receive_several(";
const END_ROWS: &str = "session.rows.end(";
const SUMMED: &str = "results.store(";
const TOLD: &str = "session.tell(";
const PEEK_NUMBERED: &str = "session.told(";
const END: &str = "session.end(";
const PREVIOUS: &str = "wait_for_previous(";
const INIT: &str = "pipeline.init(";

pub const MUTANTS: &[Mutant] = &[
    mutant("lsa_allreduce", LSA, (ENTRY, 0), Remove, &[LOAD]),
    mutant("lsa_allreduce", LSA, (ENTRY, 0), NoWait, &[LOAD]),
    mutant("lsa_allreduce", LSA, (ENTRY, 0), Relax, &[LOAD]),
    mutant("lsa_allreduce", LSA, (ENTRY, 0), NARROW, &[ENTRY]),
    mutant("lsa_allreduce", LSA, (EXIT, 0), Remove, &[LOAD]),
    mutant("lsa_allreduce", LSA, (EXIT, 0), Relax, &[LOAD]),
    mutant("lsa_allreduce", LSA, (STORE, 0), Change::Shift(1), &[STORE]),
    mutant("rmsnorm_allreduce", RMSNORM, (ENTRY, 0), Remove, &[ROWS]),
    mutant("rmsnorm_allreduce", RMSNORM, (EXIT, 0), Remove, &[ROWS]),
    mutant("numbers_of_ranks", NUMBERS, (REDUCED, 0), NARROW, &[REDUCED]),
    mutant("numbers_of_ranks", NUMBERS, (IN_SESSION, 0), NARROW, &[IN_SESSION]),
    mutant("numbers_of_ranks", NUMBERS, (IN_SESSION, 0), Remove, &[IN_SESSION, REDUCED]),
    mutant("numbers_of_threads", NUMBERS, (BLOCK_REDUCE, 0), Change::Shift(1), &[BLOCK_REDUCE]),
    mutant("transposed_part", NUMBERS, (LOAD_TRANSPOSED, 0), Change::Shift(1), &[LOAD_TRANSPOSED]),
    mutant("gin_put_signal", PUT_SIGNAL, ("gin.wait_signal(", 0), NoWait, &[PUT]),
    mutant("gin_put_signal", PUT_SIGNAL, ("gin.wait_signal(", 0), Relax, &[PUT]),
    mutant("gin_put_signal", PUT_SIGNAL, (FLUSH, 0), NoWait, &[PUT]),
    mutant("gin_put_signal", PUT_SIGNAL, (PUT, 0), Change::Signal(1), &["gin.wait_signal("]),
    mutant("gin_put_signal", PUT_SIGNAL, ("gin.expect(", 0), Remove, &[PUT]),
    mutant("gin_alltoall", GIN_A2A, (ENTRY, 0), Remove, &[PUT]),
    mutant("gin_alltoall", GIN_A2A, (FOLLOW, 0), NoWait, &[PUT]),
    mutant("gin_alltoall", GIN_A2A, (ENTRY, 0), Relax, &[PUT]),
    mutant("gin_alltoall", GIN_A2A, (FLUSH, 0), NoWait, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (ENTRY, 0), Remove, &[SUM]),
    mutant("hybrid_allreduce", HYBRID, ("coop.sync()", 0), Remove, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (FOLLOW, 0), NoWait, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (FOLLOW, 0), Relax, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (FLUSH, 0), NoWait, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (PUT, 0), Relax, &[PUT]),
    mutant("hybrid_allreduce", HYBRID, (LSA_BARRIER, 0), Remove, &[SUM, STORE_SUM]),
    mutant("hybrid_alltoall", HYBRID_A2A, (FOLLOW, 0), NoWait, &[PUT]),
    mutant("hybrid_alltoall", HYBRID_A2A, (LSA_BARRIER, 0), Remove, &["local_copy("]),
    mutant(
        "lamport_allreduce",
        LAMPORT,
        ("thread::sync_threads()", 0),
        Remove,
        &[END, "receive_all("],
    ),
    mutant("lamport_allreduce", LAMPORT, (END, 0), Remove, &[SEND, "receive_all("]),
    mutant(
        "lamport_allreduce",
        LAMPORT,
        (PREVIOUS, 0),
        NoWait,
        &["self.input.load(", "self.output.store("],
    ),
    mutant("push_allreduce", PUSH, (ROUND, 0), Remove, &[PUSHED, RECEIVED]),
    mutant("push_allreduce", PUSH, (ROUND, 0), Relax, &[PUSHED, RECEIVED]),
    mutant("push_allreduce", PUSH, (ROUND, 0), NARROW, &[ROUND]),
    mutant("push_exchange", PUSH_X, (ENTRY, 0), Remove, &[GATHERED]),
    mutant("push_exchange", PUSH_X, (EXIT, 0), Remove, &[GATHERED]),
    mutant("push_exchange", PUSH_X, (EXIT, 0), Relax, &[GATHERED]),
    mutant("pull_reduce_scatter", PULL, (ENTRY, 0), Remove, &[PULLED]),
    mutant("pull_reduce_scatter", PULL, (EXIT, 0), Remove, &[PULLED]),
    mutant("ll_alltoall", LL, (SEND, 0), Remove, &[RECEIVE]),
    mutant("ll_alltoall", LL, (SEND, 0), NARROW, &[SEND, RECEIVE]),
    mutant("lamport_exchange", ONE_STEP, (END, 0), Remove, &[SEND, RECEIVE_IN_ORDER]),
    mutant("lamport_exchange", LAMPORT_X, (SEND, 0), NARROW, &[SEND, RECEIVE_IN_ORDER]),
    mutant("lamport_exchange", ONE_STEP, (PREVIOUS, 0), NoWait, &["mem::load", "mem::store"]),
    mutant("lamport_exchange_v", LAMPORT_XV, (END, 0), Remove, &[SEND, RECEIVE]),
    mutant("lamport_exchange_v", LAMPORT_XV, (SEND, 0), NARROW, &[SEND, RECEIVE]),
    mutant("push_exchange_v", PUSH_XV, ("flag(team.rank).post(", 0), NARROW, &[".wait_at_least("]),
    mutant(
        "push_exchange_v",
        PUSH_XV,
        (".wait_at_least(", 0),
        NoWait,
        &["post(", "store_release("],
    ),
    mutant("push_exchange_v", PUSH_XV, (PREVIOUS, 0), NoWait, &["mem::load(offers"]),
    mutant("lamport_reduce_scatter", ONE_STEP, (END, 0), Remove, &[SEND, RECEIVE_IN_ORDER]),
    mutant("lamport_reduce_scatter", LAMPORT_RS, (SEND, 0), NARROW, &[SEND, RECEIVE_IN_ORDER]),
    mutant(
        "lamport_reduce_scatter",
        ONE_STEP,
        (PREVIOUS, 0),
        NoWait,
        &["self.part(", "self.output.store("],
    ),
    mutant("lamport_rmsnorm", LAMPORT_RMS, (END, 0), Remove, &[SEND, RECEIVE_IN_ORDER]),
    mutant("lamport_rmsnorm", LAMPORT_RMS, (SEND, 0), NARROW, &[SEND, RECEIVE_IN_ORDER]),
    mutant("ep_dispatch", EP_DISPATCH_PARTS, (SEND_ROW, 0), NARROW, &[SEND_ROW, PEEK_ROW]),
    mutant("ep_dispatch", EP_DISPATCH, (TOLD, 0), NARROW, &[TOLD, PEEK_NUMBERED]),
    mutant("ep_dispatch", EP_DISPATCH_PARTS, (TOLD, 0), NARROW, &[TOLD, PEEK_NUMBERED]),
    mutant(
        "ep_dispatch",
        EP_DISPATCH,
        (END_ROWS, 0),
        Remove,
        &[SEND_ROW, WAIT, PEEK_ROW, PEEK_NUMBERED],
    ),
    mutant("ep_dispatch", EP_DISPATCH, (PREVIOUS, 0), NoWait, &["mem::store", ROW]),
    mutant(
        "expert_parallel",
        EP_LAYOUT,
        (PREVIOUS, 0),
        NoWait,
        &[".load(", ".store(", "tokens_of(", ROW],
    ),
    mutant("expert_parallel", EP_COUNTERS, ("warp::sync()", 0), Remove, &["add_one(", ".load("]),
    mutant("expert_parallel", EP_LAYOUT, (SYNC, 0), Remove, &[".load(", ".store("]),
    mutant("ep_layout", EP_LAYOUT, (SYNC, 1), Remove, &[".load("]),
    mutant("ep_dispatch_f8", EP_DISPATCH_PARTS, (SEND_ROW, 0), NARROW, &[SEND_ROW, PEEK_ROW]),
    mutant("ep_dispatch_f8", EP_DISPATCH_PARTS, (SEND_ROW, 1), NARROW, &[SEND_ROW, PEEK_ROW]),
    mutant("ep_of_any_ranks", EP_DISPATCH_PARTS, (SEND_ROW, 0), NARROW, &[SEND_ROW, PEEK_ROW]),
    mutant("ep_of_any_ranks", EP_DISPATCH_PARTS, (TOLD, 0), NARROW, &[TOLD, PEEK_NUMBERED]),
    mutant("ep_of_any_ranks", EP_COMBINE_PARTS, (SEND_ROW, 0), NARROW, &[SEND_ROW, RECEIVE_ROWS]),
    mutant("ep_combine", EP_COMBINE_PARTS, (SEND_ROW, 0), NARROW, &[SEND_ROW, RECEIVE_ROWS]),
    mutant("ep_combine", EP_COMBINE, (TOLD, 0), NARROW, &[TOLD, PEEK_NUMBERED]),
    mutant("ep_combine", EP_COMBINE, (END_ROWS, 0), Remove, &[SEND_ROW, RECEIVE_ROWS]),
    mutant(
        "ep_combine_in_one_round",
        EP_COMBINE_PARTS,
        (SEND_ROW, 0),
        NARROW,
        &[SEND_ROW, RECEIVE_ROWS],
    ),
    mutant("ep_combine_in_one_round", EP_COMBINE, (END_ROWS, 0), Remove, &[SEND_ROW, RECEIVE_ROWS]),
    mutant(
        "ep_combine_in_one_round",
        EP_COMBINE,
        (PREVIOUS, 0),
        NoWait,
        &["mem::load", "tokens_of(", SUMMED],
    ),
    mutant("ep_combine", EP_COMBINE, (PREVIOUS, 0), NoWait, &["mem::load", "tokens_of(", SUMMED]),
    mutant(COUNTED, EP_PLACES, (TELL_COUNTS, 0), NARROW, &[TELL_COUNTS, "wait(Step::Counted)"]),
    mutant(COUNTED, EP_PLACES, (TELL_COUNTS, 0), Relax, &[COUNTS_STORED]),
    mutant(COUNTED, EP_PLACES, ("wait(Step::Counted)", 0), NoWait, &[COUNTS_STORED, COUNTS_LOADED]),
    mutant(COUNTED, DISPATCH_COUNTED, (SENT, 0), Relax, &[ROW, "store_returns("]),
    mutant(
        "dispatches_counted",
        DISPATCH_COUNTED,
        ("wait(Step::Sent)", 0),
        NoWait,
        &[ROW, "store_returns("],
    ),
    mutant(COUNTED, COMBINE_COUNTED, (RETURNED, 0), Relax, &[ROW]),
    mutant(COUNTED, COMBINE_COUNTED, ("wait(Step::Returned)", 0), NoWait, &[ROW]),
    mutant(
        "combines_counted",
        COMBINE_COUNTED,
        (PREVIOUS, 0),
        NoWait,
        &[ROW, "mem::load", ".load("],
    ),
    mutant("combines_counted", COMBINE_COUNTED, ("wait(Step::Ready)", 0), NoWait, &[ROW]),
    mutant(TEAMS, EP_RAIL, (PUT, 0), Change::Signal(1), &[MEETS, PUT]),
    mutant(TEAMS, EP_RAIL, (PUT, 0), Relax, &[PUT]),
    mutant(TEAMS, EP_RAIL, (MEETS, 0), NoWait, &[PUT]),
    mutant(TEAMS, EP_RAIL, ("gin.expect(", 0), Remove, &[PUT]),
    mutant(TEAMS, EP_RAIL, (FLUSH, 0), NoWait, &[PUT]),
    mutant(DISPATCHES, EP_RAIL, ("epoch.end(", 0), Remove, &[PUT]),
    mutant(
        DISPATCHES,
        DISPATCH_TEAMS,
        (PREVIOUS, 0),
        NoWait,
        &["lsa_barrier(", "mem::store(", ROW],
    ),
    mutant(DISPATCHES, DISPATCH_TEAMS, (ROUND, 0), NoWait, &["mem::store(", ROW]),
    mutant(DISPATCHES, DISPATCH_TEAMS, (EXIT, 0), Remove, &["mem::store(", ROW]),
    mutant(DISPATCHES, DISPATCH_TEAMS, (SYNC, 0), Remove, &["routes.load("]),
    mutant(DISPATCHES, DISPATCH_TEAMS, (SYNC, 1), Remove, &["mem::store_vec(", ROW]),
    mutant(COMBINES, COMBINE_TEAMS, (PREVIOUS, 0), NoWait, &["lsa_barrier(", ROW]),
    mutant(COMBINES, COMBINE_TEAMS, (ROUND, 0), NoWait, &[ROW, "part.load("]),
    mutant(COMBINES, COMBINE_TEAMS, (ROUND, 1), Remove, &[ROW, "part.load("]),
    mutant(COMBINES, COMBINE_TEAMS, (ROUND, 1), Relax, &[ROW, "part.load("]),
    mutant(COMBINES, COMBINE_TEAMS, (SYNC, 0), Remove, &[ROW]),
    mutant("gemm_wgmma", MAINLOOP, (INIT, 0), Remove, &["wait_empty(", FULL, "stage.expect("]),
    mutant("gemm_wgmma", MAINLOOP, (INIT, 0), Relax, &["wait_empty(", FULL, ".load(", "arrive"]),
    mutant("gemm_wgmma", MAINLOOP, ("self.sync()", 0), Remove, &["wait_", "stage.expect("]),
    mutant("gemm_wgmma", WARPGROUP, ("wgmma::fence()", 0), Remove, &[PRODUCT]),
    mutant("gemm_blocks", MAINLOOP, (FULL, 0), NoWait, &[MULTIPLY]),
    mutant("gemm_blocks", BLOCKS, (SUMS, 0), NoWait, &[MULTIPLY]),
    mutant("gemm_blocks", BLOCKS, ("wgmma::fence()", 0), Remove, &[MULTIPLY]),
    mutant("gemm_wgmma", MAINLOOP, (FULL, 0), NoWait, &[PRODUCT]),
    mutant("gemm_wgmma", MAINLOOP, (EMPTY, 0), NoWait, &[PRODUCT, "stage.expect("]),
    mutant("gemm_wgmma", MAINLOOP, ("wgmma::wait_groups::<1>()", 0), NoWait, &[PRODUCT]),
    mutant("gemm_wgmma", MAINLOOP, (SUMS, 0), NoWait, &[PRODUCT]),
    mutant("gemm_wgmma", LAST_ROWS, ("group.wait_until_read()", 0), NoWait, &[STAGED]),
    mutant("gemm_wgmma", WARPGROUP, (FENCE, 1), Remove, &[STAGED]),
    mutant("gemm_wgmma", STORES, ("group.store(", 0), Remove, &[STAGED]),
    mutant("gemm_swapped", MAINLOOP, (FULL, 0), NoWait, &[MULTIPLY]),
    mutant("gemm_swapped", MAINLOOP, (EMPTY, 0), NoWait, &[MULTIPLY, FULL, "stage.load_once("]),
    mutant("gemm_swapped", SWAPPED_TILES, ("self.received.wait(", 0), NoWait, &SPLIT),
    mutant("gemm_swapped", MAINLOOP, (SUMS, 0), NoWait, &[MULTIPLY]),
    mutant("gemm_swapped", SWAPPED_STORES, (READ, 0), NoWait, &["store_transposed("]),
    mutant("gemm_swapped", SWAPPED_STORES, (FENCE, 0), Remove, &["store_transposed("]),
    mutant(
        "gemm_swapped",
        SWAPPED_STORES,
        ("named_barrier_sync(", 1),
        Remove,
        &["store_transposed("],
    ),
    mutant("gemm_unswapped", SWAPPED, ("named_barrier_sync(", 0), Remove, &SPLIT),
    mutant("gemm_unswapped", SWAPPED_TILES, ("self.drained.wait(", 0), NoWait, &SPLIT),
    mutant("gemm_sliced", SLICES, ("named_barrier_sync(", 0), Remove, &[SLICE]),
    mutant("gemm_sliced", SLICES, ("named_barrier_sync(", 1), Remove, &["mem::load(is_last"]),
    mutant("gemm_sliced", SLICES, (ARRIVED, 0), Relax, &[SLICE]),
    mutant("gemm_sliced", SLICES, (ARRIVED, 0), Change::Narrow(Scope::Cta), &[ARRIVED]),
    mutant("gemm_after_gemm", SWAPPED, (PREVIOUS, 0), NoWait, &["stage.load"]),
    mutant("gemm_grouped_swapped", GROUPED, (PREVIOUS, 0), NoWait, &["stage.load", "mem::store("]),
    mutant("gemm_grouped_swapped", MAINLOOP, (FULL, 0), NoWait, &["group.multiply("]),
    mutant("gemm_grouped_swapped", MAINLOOP, (EMPTY, 0), NoWait, &["stage.load", "stage.expect("]),
    mutant("gemm_mma", MMA, ("product.sums::<", 0), NoWait, &["product.sums::<"]),
    mutant("gemm_allreduce_mma", FUSED, ("named_barrier_sync(", 0), Remove, &[PARTIAL]),
    mutant("gemm_allreduce_mma", FUSED, ("flag.post(", 0), NARROW, &[FLAG]),
    mutant("gemm_allreduce_mma", FUSED, ("flag.post(", 0), Relax, &[PARTIAL]),
    mutant("gemm_allreduce_mma", FUSED, ("self.comm.lsa_barrier(", 0), Remove, &[PARTIAL]),
    mutant("gemm_allreduce_e4m3", FUSED, ("flag.post(", 0), Relax, &[SCALES]),
    mutant(
        "gemm_allreduce_wide",
        LAST_ROWS,
        ("tma::wait_stores::<1>()", 0),
        NoWait,
        &["hooks.store_part("],
    ),
    mutant(
        "gemm_allreduce_wide_f8",
        LAST_ROWS,
        ("tma::wait_stores::<1>()", 0),
        NoWait,
        &["hooks.store_part("],
    ),
    mutant("gemm_allreduce_wide", WIDE, ("self.stored(", 0), Relax, &["sums.add("]),
    mutant("allgather_gemm", GATHER, (PREVIOUS, 0), NoWait, &[PUSHED_ROWS]),
    mutant("allgather_gemm", GATHER, (PUSHED_ROWS, 0), NARROW, &[ARRIVAL]),
    mutant("allgather_gemm", GATHER, (PUSHED_ROWS, 0), Relax, &[PUSHED_ROWS]),
    mutant("allgather_gemm", GATHER, (ARRIVAL, 0), Relax, &[PUSHED_ROWS]),
    mutant("allgather_gemm", GATHER, ("store_ordered(arrived()", 0), Relax, &[BANK]),
    mutant("allgather_gemm", GATHER, ("fence_async_global()", 0), Remove, &[PUSHED_ROWS]),
    mutant("guide_few", FEW, (ADD_IN_REGISTERS, 0), NoWait, &[ADD_IN_REGISTERS]),
    mutant("guide_few", FEW, (STORE_TRANSPOSED, 0), Relax, &[STORE_TRANSPOSED]),
    mutant("guide_few", FEW, (STORE_TRANSPOSED, 0), NoWait, &[STORE_TRANSPOSED]),
    mutant("guide_wide", GUIDE_WIDE, ("peers.prepare()", 0), Remove, &["sums.add("]),
    mutant("guide_wide", GUIDE_WIDE, ("wait_stored(", 0), NoWait, &["sums.add("]),
    mutant("guide_wide", GUIDE_WIDE, (".stored(", 0), Relax, &["sums.add("]),
    mutant("guide_wide", LAST_ROWS, ("tma::wait_stores::<1>()", 0), NoWait, &["sums.add("]),
    mutant("guide_wide", GUIDE_WIDE, ("sums.add(", 0), NoWait, &[".send("]),
    mutant("guide_wide", LAST_ROWS, ("wait_until_read()", 0), NoWait, &[STAGED]),
    mutant(
        "guide_wide",
        GUIDE_WIDE,
        ("group.store(|| unsafe", 0),
        Remove,
        &["peers.keep(", ".send("],
    ),
];

const NARROW: Change = Change::Narrow(Scope::Gpu);

const fn mutant(
    program: &'static str,
    file: &'static str,
    line: (&'static str, usize),
    change: Change,
    names: &'static [&'static str],
) -> Mutant {
    Mutant { program, file, line, change, names }
}
