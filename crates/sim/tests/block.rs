//! Threads of one block: shared memory, barriers, warps, atomics.

use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::prelude::*;
use devcomm_sim::{LaunchConfig, Simulator};
use nccl_device::Coop;

/// Sum of a block's 256 elements, through shared memory and then shuffles.
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
    for builder in [Simulator::builder(), Simulator::builder().seed(3).preempt(true)] {
        let sim = builder.build().unwrap();
        let (x, out) = (sim.buffer::<f32>(0, 1024).unwrap(), sim.buffer::<f32>(0, 4).unwrap());
        let data: Vec<f32> = (0..1024).map(|i| (i % 31) as f32).collect();
        x.write(&data).unwrap();
        // SAFETY: a block an output, 256 inputs a block.
        unsafe { sim.launch(block_sum, LaunchConfig::new(4, 256), |_| (&x, &out)) }.unwrap();
        let want: Vec<f32> = data.chunks(256).map(|block| block.iter().sum()).collect();
        assert_eq!(out.read(), want);
    }
}

#[kernel]
unsafe fn reverse(x: *mut u32) {
    let copy = shared::dynamic_shared_mem::<u32>();
    let (t, n) = (thread::thread_idx_x() as usize, thread::block_dim_x() as usize);
    // SAFETY: the launch gives four bytes a thread.
    unsafe {
        *copy.add(t) = mem::load(x.add(t));
        thread::sync_threads();
        mem::store(x.add(t), *copy.add(n - 1 - t));
    }
}

#[test]
fn dynamic_shared_memory_has_the_size_asked_for() {
    let sim = Simulator::new(1).unwrap();
    let x = sim.buffer::<u32>(0, 100).unwrap();
    x.write(&(0..100).collect::<Vec<_>>()).unwrap();
    let config = LaunchConfig { grid: 1, block: 100, dynamic_shared: 400 };
    // SAFETY: four bytes of shared memory a thread.
    unsafe { sim.launch(reverse, config, |_| (&x,)) }.unwrap();
    assert_eq!(x.read(), (0..100).rev().collect::<Vec<_>>());
}

#[kernel(T = [f32, f64, f16, bf16])]
unsafe fn reads_unset_shared<T: Copy>(out: *mut T) {
    let fresh = shared_array![T; 3];
    // SAFETY: one thread, and one element.
    unsafe { mem::store(out, *fresh.add(2)) }
}

#[test]
fn fresh_memory_is_not_a_number_in_any_type() {
    let sim = Simulator::new(1).unwrap();
    macro_rules! check {
        ($($type:ty)*) => { $(
            let out = sim.buffer::<$type>(0, 2).unwrap();
            let kernel = reads_unset_shared::<$type>;
            // SAFETY: the buffer has an element.
            unsafe { sim.launch(kernel, LaunchConfig::new(1, 1), |_| (&out,)) }.unwrap();
            assert!(out.read().iter().all(|x| x.is_nan()));
        )* };
    }
    check!(f32 f64 f16 bf16);
}

#[kernel]
unsafe fn shuffles(out: *mut u32) {
    let t = thread::thread_idx_x();
    let lane = t % 32;
    // SAFETY: all lanes of the masks take part; the buffer has four rows of 32.
    unsafe {
        let row = |r: u32| out.add((r * 32 + lane) as usize);
        if lane >= 16 {
            mem::store(row(0), warp::warp_shuffle_down(0xffff_0000, lane, 1, 8).0);
        } else {
            mem::store(row(0), warp::warp_vote_ballot(0x0000_ffff, lane.is_multiple_of(3)));
        }
        mem::store(row(1), warp::warp_shuffle_up(!0, lane, 3, 16).0);
        mem::store(row(2), warp::warp_shuffle_idx(!0, lane, 5, 8).0);
        mem::store(row(3), warp::shuffle_xor(u64::from(lane) << 40, 7) as u32);
        mem::store(row(3), (warp::shuffle_xor(u64::from(lane) << 40, 7) >> 40) as u32);
    }
}

#[test]
fn warp_operations_follow_masks_and_widths() {
    let sim = Simulator::builder().seed(1).build().unwrap();
    let out = sim.buffer::<u32>(0, 128).unwrap();
    // SAFETY: four rows of 32.
    unsafe { sim.launch(shuffles, LaunchConfig::new(1, 32), |_| (&out,)) }.unwrap();
    let got = out.read();
    for lane in 0..32_u32 {
        let i = lane as usize;
        let thirds = (0..16).filter(|l| l % 3 == 0).fold(0, |bits, l| bits | 1 << l);
        let down = if lane % 8 == 7 { lane } else { lane + 1 };
        assert_eq!(got[i], if lane < 16 { thirds } else { down }, "lane {lane}");
        assert_eq!(got[32 + i], if lane % 16 < 3 { lane } else { lane - 3 });
        assert_eq!(got[64 + i], lane / 8 * 8 + 5);
        assert_eq!(got[96 + i], lane ^ 7);
    }
}

#[kernel]
unsafe fn votes_of_a_partial_warp(out: *mut u32) {
    let t = thread::thread_idx_x();
    if t == 39 {
        return;
    }
    // SAFETY: the lanes that exist and have not left take part.
    unsafe { mem::store(out.add(t as usize), warp::ballot(true)) };
}

#[test]
fn lanes_that_left_or_never_were_are_not_waited_for() {
    let sim = Simulator::new(1).unwrap();
    let out = sim.buffer::<u32>(0, 40).unwrap();
    let launch = LaunchConfig::new(1, 40);
    // SAFETY: 40 elements.
    unsafe { sim.launch(votes_of_a_partial_warp, launch, |_| (&out,)) }.unwrap();
    let got = out.read();
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
    // SAFETY: a word a thread; the coops' barriers order the accesses of their threads.
    unsafe {
        *seen.add(t as usize) = coop.thread_rank();
        coop.sync();
        // The thread of the coop with the rank opposite of this one's.
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
        let sim = Simulator::builder().seed(seed).build().unwrap();
        let out = sim.buffer::<u32>(0, 160).unwrap();
        // SAFETY: an element a thread.
        unsafe { sim.launch(coops, LaunchConfig::new(1, 160), |_| (&out,)) }.unwrap();
        for (t, got) in (0..160_u32).zip(out.read()) {
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
unsafe fn producer_and_consumer(flag: *mut u32, data: *mut u32) {
    // SAFETY: both have a word; the flag orders the data.
    unsafe {
        let flag = Atomic::from_ptr(flag);
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
    let sim = Simulator::new(1).unwrap();
    let (flag, data) = (sim.buffer::<u32>(0, 1).unwrap(), sim.buffer::<u32>(0, 2).unwrap());
    flag.write(&[0]).unwrap();
    let launch = LaunchConfig::new(2, 1);
    // SAFETY: the buffers have the words.
    unsafe { sim.launch(producer_and_consumer, launch, |_| (&flag, &data)) }.unwrap();
    assert_eq!(data.read(), [41, 42]);
}

#[kernel]
unsafe fn locked_increments(lock: *mut u32, count: *mut u32) {
    // SAFETY: the lock orders the accesses to the count.
    unsafe {
        let lock = Atomic::from_ptr(lock);
        while lock.compare_exchange(0, 1, Order::AcqRel, Scope::Gpu).is_err() {}
        let seen = mem::load(count);
        mem::store(count, seen + 1);
        lock.store(0, Order::Release, Scope::Gpu);
    }
}

#[test]
fn a_spin_lock_excludes() {
    let sim = Simulator::builder().seed(11).preempt(true).build().unwrap();
    let (lock, count) = (sim.buffer::<u32>(0, 1).unwrap(), sim.buffer::<u32>(0, 1).unwrap());
    lock.write(&[0]).unwrap();
    count.write(&[0]).unwrap();
    let launch = LaunchConfig::new(3, 64);
    // SAFETY: the buffers have a word each.
    unsafe { sim.launch(locked_increments, launch, |_| (&lock, &count)) }.unwrap();
    assert_eq!(count.read(), [192]);
}

#[kernel]
unsafe fn unlocked_increments(count: *mut u32) {
    // SAFETY: the buffer has a word. (The increments race on purpose.)
    unsafe {
        let seen = mem::load(count);
        mem::store(count, seen + 1);
    }
}

#[test]
fn preemption_loses_the_updates_of_a_race() {
    let sim = Simulator::builder().seed(5).preempt(true).build().unwrap();
    let count = sim.buffer::<u32>(0, 1).unwrap();
    count.write(&[0]).unwrap();
    // SAFETY: the buffer has a word.
    unsafe { sim.launch(unlocked_increments, LaunchConfig::new(1, 64), |_| (&count,)) }.unwrap();
    assert!(count.read()[0] < 64);
}

#[kernel]
unsafe fn prints() {
    if thread::thread_idx_x() == 1 {
        cuda_std::println!("block {} says {}", thread::block_idx_x(), 1.5_f32);
    }
}

#[test]
fn what_a_kernel_prints_is_in_the_report() {
    let sim = Simulator::new(1).unwrap();
    // SAFETY: the kernel touches nothing.
    let report = unsafe { sim.launch(prints, LaunchConfig::new(2, 2), |_| ()) }.unwrap();
    assert_eq!(report.printed, "block 0 says 1.5\nblock 1 says 1.5\n");
}

#[kernel]
unsafe fn counts_blocks(count: *mut u32) {
    if thread::thread_idx_x() == 0 {
        // SAFETY: the buffer has a word.
        unsafe { Atomic::from_ptr(count) }.fetch_add(1, Order::Relaxed, Scope::Gpu);
    }
    thread::sync_threads();
}

#[test]
fn a_grid_larger_than_the_device_runs_in_waves() {
    let sim = Simulator::builder().multiprocessors(2).build().unwrap();
    let count = sim.buffer::<u32>(0, 1).unwrap();
    count.write(&[0]).unwrap();
    // SAFETY: the buffer has a word.
    unsafe { sim.launch(counts_blocks, LaunchConfig::new(1000, 64), |_| (&count,)) }.unwrap();
    assert_eq!(count.read(), [1000]);
}

#[kernel]
unsafe fn waits_for_a_time(out: *mut u64) {
    let start = cuda_std::clock::globaltimer();
    let mut now = start;
    while now - start < 1_000_000 {
        now = cuda_std::clock::globaltimer();
    }
    // SAFETY: the buffer has an element.
    unsafe { mem::store(out, now - start) }
}

#[test]
fn time_passes_for_those_who_look() {
    let sim = Simulator::new(1).unwrap();
    let out = sim.buffer::<u64>(0, 1).unwrap();
    // SAFETY: the buffer has an element.
    unsafe { sim.launch(waits_for_a_time, LaunchConfig::new(1, 1), |_| (&out,)) }.unwrap();
    assert!(out.read()[0] >= 1_000_000);
}
