//! Tests of threads of one block: shared memory, barriers, warps, atomics.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::process::Command;

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm::sim::{Change, Mutation};
use devcomm::{Element, Kernel, Simulation, SymmetricBuffer};
use devcomm_testing::simulated::{Gpu, failure, read, simulate};
use devcomm_types::LaunchArgs;
use nccl_device::Coop;

/// Runs a kernel on one GPU with a buffer that contains `memory`, and returns the buffer's content.
fn output<T: Element, K: Kernel, const N: usize>(
    simulation: Simulation,
    (grid, block): (u32, u32),
    memory: [T; N],
) -> Vec<T>
where
    for<'a> (&'a SymmetricBuffer<T>,): LaunchArgs<K::Args>,
{
    let outputs = simulate(simulation, |gpu| {
        let memory = gpu.buffer(&memory)?;
        gpu.launch(K::with_args((&memory,)).grid(grid).block(block))?;
        read(&memory)
    });
    outputs.concat()
}

/// Sums a block's 256 elements, through shared memory and then shuffles.
#[kernel]
unsafe fn block_sum(x: *const f32, out: *mut f32) {
    let partial = shared_array![f32; 256];
    let t = thread::thread_idx_x() as usize;
    // SAFETY: 256 threads; the barriers order the accesses to shared memory.
    unsafe {
        *partial.add(t) = mem::load(x.add(thread::index_1d() as usize));
        thread::sync_threads();
        let mut half = 128;
        while half >= 32 {
            if t < half {
                *partial.add(t) += *partial.add(t + half);
            }
            thread::sync_threads();
            half /= 2;
        }
        if t < 32 {
            let mut sum = *partial.add(t);
            for lane_mask in [16, 8, 4, 2, 1] {
                sum += warp::shuffle_xor(sum, lane_mask);
            }
            if t == 0 {
                mem::store(out.add(thread::block_idx_x() as usize), sum);
            }
        }
    }
}

#[test]
fn blocks_sum_through_shared_memory_and_shuffles() {
    let data: Vec<f32> = (0..1024).map(|i| (i % 31) as f32).collect();
    let want: Vec<f32> = data.chunks(256).map(|block| block.iter().sum()).collect();
    for simulation in [Simulation::new(1), Simulation::new(1).seed(3).preempt(true)] {
        let sums = simulate(simulation, |gpu| {
            let (x, out) = (gpu.buffer(&data)?, gpu.buffer(&[0.0; 4])?);
            gpu.launch(block_sum::args(&x, &out).grid(4).block(256))?;
            read(&out)
        });
        assert_eq!(sums, std::slice::from_ref(&want));
    }
}

#[kernel]
unsafe fn reverse(x: *mut u32) {
    let copy = shared::dynamic_shared_mem::<u32>();
    let (t, n) = (thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
    // SAFETY: the launch has four bytes of dynamic shared memory per thread.
    unsafe {
        *copy.add(t) = mem::load(x.add(t));
        thread::sync_threads();
        mem::store(x.add(t), *copy.add(n - 1 - t));
    }
}

#[test]
fn dynamic_shared_memory_has_the_size_asked_for() {
    let reversed = simulate(Simulation::new(1), |gpu| {
        let x = gpu.buffer(&(0..100).collect::<Vec<u32>>())?;
        // Four bytes of shared memory per thread.
        gpu.launch(reverse::args(&x).grid(1).block(100).dynamic_shared(400))?;
        read(&x)
    });
    assert_eq!(reversed, [(0..100).rev().collect::<Vec<_>>()]);
}

#[kernel(T = [f32, f64, f16, bf16])]
unsafe fn reads_unset_shared<T: Copy>(out: *mut T) {
    let fresh = shared_array![T; 3];
    // SAFETY: the launch has one thread, the buffer one element.
    unsafe { mem::store(out, *fresh.add(2)) }
}

#[test]
fn fresh_memory_is_not_a_number_in_any_type() {
    macro_rules! check {
        ($($type:ty)*) => { $(
            let out = [<$type>::default(); 1];
            let seen = output::<_, reads_unset_shared<$type>, _>(Simulation::new(1), (1, 1), out);
            assert!(seen[0].is_nan());
        )* };
    }
    check!(f32 f64 f16 bf16);
}

#[kernel]
unsafe fn shuffles(out: *mut u32) {
    let t = thread::thread_idx_x();
    let lane = t % 32;
    // SAFETY: all lanes of the masks take part; the buffer has five rows of 32.
    unsafe {
        let row = |r: u32| out.add((r * 32 + lane) as usize);
        if lane >= 16 {
            mem::store(row(0), warp::warp_shuffle_down(0xffff_0000, lane, 1, 8).0);
        } else {
            mem::store(row(0), warp::warp_vote_ballot(0x0000_ffff, lane.is_multiple_of(3)));
        }
        mem::store(row(1), warp::warp_shuffle_up(!0, lane, 3, 16).0);
        mem::store(row(2), warp::warp_shuffle_idx(!0, lane, 5, 8).0);
        let halves = warp::shuffle_xor(u64::from(lane) << 40 | u64::from(100 + lane), 7);
        mem::store(row(3), (halves >> 40) as u32);
        mem::store(row(4), halves as u32);
    }
}

#[test]
fn warp_operations_follow_masks_and_widths() {
    let got = output::<_, shuffles, _>(Simulation::new(1).seed(1), (1, 32), [0; 160]);
    for lane in 0..32_u32 {
        let i = lane as usize;
        let thirds = (0..16).filter(|l| l % 3 == 0).fold(0, |bits, l| bits | 1 << l);
        let down = if lane % 8 == 7 { lane } else { lane + 1 };
        assert_eq!(got[i], if lane < 16 { thirds } else { down }, "lane {lane}");
        assert_eq!(got[32 + i], if lane % 16 < 3 { lane } else { lane - 3 });
        assert_eq!(got[64 + i], lane / 8 * 8 + 5);
        assert_eq!((got[96 + i], got[128 + i]), (lane ^ 7, 100 + (lane ^ 7)));
    }
}

/// The first thread leaves, and the others count.
#[kernel]
unsafe fn counts_without_the_first(out: *mut u32) {
    let thread = thread::thread_idx_x();
    if thread == 0 {
        return;
    }
    let all = [thread::sync_threads_count(1), thread::sync_threads_and(1)];
    let some = [thread::sync_threads_or(0), thread::sync_threads_count(thread % 2)];
    if thread == 63 {
        for (i, number) in all.into_iter().chain(some).enumerate() {
            // SAFETY: the buffer has four numbers, which one thread stores.
            unsafe { mem::store(out.add(i), number) };
        }
    }
}

#[test]
fn barriers_that_count_serve_the_threads_that_are_left() {
    for simulation in [Simulation::new(1), Simulation::new(1).seed(3).preempt(true)] {
        let counted = output::<_, counts_without_the_first, _>(simulation, (1, 64), [0; 4]);
        assert_eq!(counted, [63, 1, 0, 32]);
    }
}

#[kernel]
unsafe fn votes_of_a_partial_warp(out: *mut u32) {
    let t = thread::thread_idx_x();
    if t == 39 {
        return;
    }
    // SAFETY: all lanes that exist and have not exited take part.
    unsafe { mem::store(out.add(t as usize), warp::ballot(true)) };
}

#[test]
fn lanes_that_have_exited_or_do_not_exist_are_not_waited_for() {
    let got = output::<_, votes_of_a_partial_warp, _>(Simulation::new(1), (1, 40), [0; 40]);
    assert_eq!(got[0], u32::MAX);
    assert_eq!(got[38], 0b0111_1111);
}

#[kernel]
unsafe fn coops(out: *mut u32) {
    let t = thread::thread_idx_x();
    let coop = match t / 32 {
        0 => Coop::lanes(if t.is_multiple_of(2) { 0x5555_5555 } else { 0xaaaa_aaaa }),
        1 | 2 => Coop::warp_span(1, 2, 4),
        3 => Coop::warp(),
        _ => Coop::thread(),
    };
    let seen = shared_array![u32; 160];
    // SAFETY: one word per thread; the coops' barriers order the accesses of their threads.
    unsafe {
        *seen.add(t as usize) = coop.thread_rank();
        coop.sync();
        // The thread of the coop with rank `size - 1 - rank`, if this thread has rank `rank`.
        let mut opposite = t;
        for other in 0..160 {
            let same = match t / 32 {
                0 => other < 32 && other % 2 == t % 2,
                1 | 2 => (32..96).contains(&other),
                3 => (96..128).contains(&other),
                _ => other == t,
            };
            if same && *seen.add(other as usize) == coop.size() - 1 - coop.thread_rank() {
                opposite = other;
            }
        }
        mem::store(out.add(t as usize), opposite);
        Coop::cta().sync();
    }
}

#[test]
fn coops_rank_and_meet_their_own_threads() {
    for seed in 0..4 {
        let out = output::<_, coops, _>(Simulation::new(1).seed(seed), (1, 160), [0; 160]);
        for (t, got) in (0..160_u32).zip(out) {
            let want = match t / 32 {
                0 => 30 - t / 2 * 2 + t % 2,
                1 | 2 => 127 - t,
                3 => 223 - t,
                _ => t,
            };
            assert_eq!(got, want, "thread {t}");
        }
    }
}

#[kernel]
unsafe fn producer_and_consumer(data: *mut u32) {
    // SAFETY: the buffer has three words; the last is a flag that orders accesses to the others.
    unsafe {
        let flag = Atomic::from_ptr(data.add(2));
        if thread::block_idx_x() == 0 {
            while flag.load(Order::Acquire, Scope::Gpu) == 0 {}
            mem::store(data.add(1), mem::load(data) + 1);
        } else {
            mem::store(data, 41);
            flag.store(1, Order::Release, Scope::Gpu);
        }
    }
}

#[test]
fn a_thread_that_polls_lets_others_run() {
    let data = output::<_, producer_and_consumer, _>(Simulation::new(1), (2, 1), [0; 3]);
    assert_eq!(data, [41, 42, 1]);
}

#[kernel]
unsafe fn locked_increments(count: *mut u32) {
    // SAFETY: the buffer has a count and a lock, which orders the accesses to the count.
    unsafe {
        let lock = Atomic::from_ptr(count.add(1));
        while lock.compare_exchange(0, 1, Order::AcqRel, Scope::Gpu).is_err() {}
        let seen = mem::load(count);
        mem::store(count, seen + 1);
        lock.store(0, Order::Release, Scope::Gpu);
    }
}

#[test]
fn a_spin_lock_excludes() {
    let simulation = Simulation::new(1).seed(11).preempt(true);
    assert_eq!(output::<_, locked_increments, _>(simulation, (3, 64), [0; 2]), [192, 0]);
}

#[kernel]
unsafe fn unlocked_increments(count: *mut u32) {
    // SAFETY: the buffer has one element. (The race is intended.)
    unsafe {
        let seen = mem::load(count);
        mem::store(count, seen + 1);
    }
}

#[test]
fn preemption_loses_the_updates_of_a_race() {
    let simulation = Simulation::new(1).seed(5).preempt(true).races(false);
    assert!(output::<_, unlocked_increments, _>(simulation, (1, 64), [0])[0] < 64);
}

#[kernel]
unsafe fn prints() {
    if thread::thread_idx_x() == 1 {
        cuda_std::println!("block {} says {}", thread::block_idx_x(), 1.5_f32);
    }
}

#[test]
fn what_a_kernel_prints_the_program_prints() {
    const IN_CHILD: &str = "DEVCOMM_TEST_PRINTS";
    if std::env::var_os(IN_CHILD).is_some() {
        simulate(Simulation::new(1), |gpu| gpu.launch(prints::args().grid(2).block(2)));
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture", "block::what_a_kernel_prints_the_program_prints"]);
    let output = child.env(IN_CHILD, "1").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("block 0 says 1.5\nblock 1 says 1.5\n"), "{printed}");
}

#[kernel]
unsafe fn counts_blocks(count: *mut u32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: the buffer has one element.
        unsafe { Atomic::from_ptr(count) }.fetch_add(1, Order::Relaxed, Scope::Gpu);
    }
    thread::sync_threads();
}

#[test]
fn a_grid_larger_than_the_device_runs_in_waves() {
    let simulation = Simulation::new(1).multiprocessors(2);
    assert_eq!(output::<_, counts_blocks, _>(simulation, (1000, 64), [0]), [1000]);
}

#[kernel]
unsafe fn waits_for_a_time(out: *mut u64) {
    let start = cuda_std::clock::globaltimer();
    let mut now = start;
    while now - start < 1_000_000 {
        now = cuda_std::clock::globaltimer();
    }
    // SAFETY: the buffer has one element.
    unsafe { mem::store(out, now - start) }
}

#[test]
fn time_passes_for_threads_that_read_the_clock() {
    let waited = output::<_, waits_for_a_time, _>(Simulation::new(1), (1, 1), [0_u64]);
    assert!(waited[0] >= 1_000_000);
}

/// Lane 31 reads the last word, which nothing has initialised, if `reads`.
#[kernel]
unsafe fn reads_shared(out: *mut u32, reads: bool) {
    let words = shared_array![u32; 33];
    let i = thread::thread_idx_x() as usize;
    // SAFETY: an element per lane, and one more; the barrier orders the accesses.
    unsafe {
        mem::store(words.add(i), 1);
        thread::sync_threads();
        let next = if i < 31 || reads { i + 1 } else { i };
        mem::store(out.add(i), mem::load(words.add(next)));
    }
}

#[test]
fn a_read_of_shared_memory_that_nothing_has_written_is_reported() {
    let launch = |gpu: &Gpu<'_>, reads| {
        let out = gpu.buffer(&[0_u32; 32])?;
        gpu.launch(reads_shared::args(&out, reads).grid(1).block(32))
    };
    simulate(Simulation::new(1), |gpu| launch(gpu, false));
    let error = failure(Simulation::new(1), |gpu| launch(gpu, true)).to_string();
    let (who, what) =
        ("reads_shared: rank 0 block 0 thread 31 at ", "reads byte 128 of the shared array");
    assert!(error.starts_with(who) && error.contains("block.rs:"), "{error}");
    assert!(error.contains(what) && error.ends_with("which nothing has written"), "{error}");
}

/// Every thread votes no, the first one late, and stores the outcome.
#[kernel]
unsafe fn votes(out: *mut u32) {
    let t = thread::thread_idx_x();
    if t == 0 {
        thread::nanosleep(1);
    }
    let outcome = thread::sync_threads_or(0) + 2 * thread::named_barrier_sync_or(1, 64, 0);
    // SAFETY: the buffer has an element for each thread.
    unsafe { mem::store(out.add(t as usize), outcome) };
}

#[test]
fn a_vote_without_its_barrier_returns_each_threads_own_vote() {
    let mut lines = include_str!("block.rs").lines().zip(1..);
    let (_, line) = lines.find(|(line, _)| line.contains("sync_threads_or(0)")).unwrap();
    let removed = Mutation::new("block.rs", line, Change::Remove);
    for simulation in [Simulation::new(1), Simulation::new(1).mutation(removed).races(false)] {
        assert_eq!(output::<_, votes, 64>(simulation, (1, 64), [7_u32; 64]), [0; 64]);
    }
}

/// The threads of the last warp, which is half a warp, wait for each other; then also those of the
/// warp before it, in one barrier for both.
#[kernel]
unsafe fn syncs_a_partial_warp(out: *mut u32) {
    let t = thread::thread_idx_x();
    // SAFETY: the buffer has one word; the barriers order the accesses.
    unsafe {
        if t == 79 {
            mem::store(out, 1);
        }
        if t >= 64 {
            thread::named_barrier_sync(1, 32);
        }
        if t == 64 {
            mem::store(out, mem::load(out) + 1);
        }
        if t >= 32 {
            thread::named_barrier_sync(2, 64);
        }
        if t == 32 {
            mem::store(out, mem::load(out) + 1);
        }
        thread::named_barrier_sync(3, 96);
        if t == 0 {
            mem::store(out, mem::load(out) + 1);
        }
    }
}

#[test]
fn a_barrier_for_some_warps_counts_the_missing_lanes_of_a_partial_one() {
    for simulation in [Simulation::new(1), Simulation::new(1).seed(1)] {
        assert_eq!(output::<_, syncs_a_partial_warp, _>(simulation, (1, 80), [0_u32]), [4]);
    }
}

#[test]
fn a_kernel_that_prints_to_a_closed_standard_output_goes_on() {
    const IN_CHILD: &str = "DEVCOMM_TEST_PRINTS_TO_CLOSED";
    if std::env::var_os(IN_CHILD).is_some() {
        // SAFETY: nothing in this process uses its standard input and output in the meantime.
        unsafe { (0..2).for_each(|fd| drop(OwnedFd::from_raw_fd(fd))) };
        // The pipe gets the numbers that are free now: its writer is the standard output.
        let (reader, writer) = std::io::pipe().unwrap();
        assert_eq!(writer.into_raw_fd(), 1);
        drop(reader);
        simulate(Simulation::new(1), |gpu| gpu.launch(prints::args().grid(2).block(2)));
        eprintln!("it has ended");
        return;
    }
    let name = "block::a_kernel_that_prints_to_a_closed_standard_output_goes_on";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let output = child.args(["--exact", "--nocapture", name]).env(IN_CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("it has ended"), "{said}");
}
