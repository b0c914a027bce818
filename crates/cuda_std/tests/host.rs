//! Tests of device functions on the host.

mod common;

use std::collections::BTreeSet;

use common::{Event, run, run_as, thread};
use cuda_std::arch::{Access, Shuffle, ThreadCtx};
use cuda_std::atomic::{
    AtomicF32, AtomicF64, AtomicI32, AtomicI64, AtomicU32, AtomicU64, Order, Scope, fence,
};
use cuda_std::prelude::*;
use cuda_std::strided::share;
use cuda_std::thread::{UVec2, UVec3};
use cuda_std::tile::SharedTile;
use cuda_std::{clock, math, print, println};

/// Returns the panic message of `f` run as a thread.
fn panic_of(f: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(|| run(f)).expect_err("it should panic");
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast::<&str>().expect("a message").to_string(),
    }
}

#[test]
fn every_thread_of_a_launch_has_an_index_of_its_own() {
    let (grid, block) = ([2, 3, 2], [4, 2, 3]);
    let mut seen = BTreeSet::new();
    let cells = |[x, y, z]: [u32; 3]| {
        (0..z).flat_map(move |z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])))
    };
    for block_idx in cells(grid) {
        for thread_idx in cells(block) {
            let context =
                ThreadCtx { block_idx, thread_idx, grid_dim: grid, block_dim: block, ..thread() };
            seen.insert(run_as(context, thread::index).0);
        }
    }
    let threads = grid.iter().chain(&block).product::<u32>();
    assert_eq!(seen, (0..threads).collect());
}

#[test]
fn indices_are_those_of_the_running_thread() {
    let context = || ThreadCtx {
        thread_idx: [3, 1, 0],
        block_idx: [2, 4, 1],
        block_dim: [40, 2, 1],
        grid_dim: [5, 6, 7],
        ..thread()
    };
    run_as(context(), || {
        assert_eq!(thread::thread_idx(), UVec3 { x: 3, y: 1, z: 0 });
        assert_eq!(thread::block_idx_y(), 4);
        assert_eq!(thread::block_dim().element_product(), 80);
        assert_eq!(thread::grid_dim_z(), 7);
        assert_eq!(thread::index_1d(), 83);
        assert_eq!(thread::index_2d(), UVec2 { x: 83, y: 9 });
        assert_eq!(thread::index_3d(), UVec3 { x: 83, y: 9, z: 1 });
        assert_eq!((warp::warp_id(), warp::lane_id()), (1, 11));
        assert_eq!(warp::activemask(), u32::MAX);
        assert!(!thread::first());
        assert_eq!(clock::clock64(), 42);
    });
    run_as(ThreadCtx { thread_idx: [2, 0, 0], ..context() }, || {
        assert_eq!(warp::activemask(), u32::MAX);
    });
    run_as(ThreadCtx { thread_idx: [39, 1, 0], ..context() }, || {
        assert_eq!(warp::activemask(), 0xffff, "the last warp of 80 threads has 16 lanes");
    });
    assert!(run(thread::first).0);
}

#[test]
fn a_device_function_outside_a_simulator_says_where_kernels_run() {
    let panic = std::panic::catch_unwind(thread::thread_idx_x).expect_err("no thread runs");
    let text = panic.downcast::<&str>().expect("a message");
    assert!(text.contains("in the simulator or on a GPU"), "{text}");
}

#[test]
fn an_8_bit_element_of_a_tile_is_not_read_as_a_word() {
    let text = panic_of(|| {
        let tile = SharedTile::<F8E4M3, 8>::at(shared_array![u8; 1024]);
        // SAFETY: the tile has the element; it is not read.
        unsafe { tile.bits(0, 0) };
    });
    assert!(text.contains("have 16 or 32 bits"), "{text}");
}

#[test]
fn a_barrier_is_reported_at_the_line_of_its_caller() {
    let line = line!() + 2;
    let ((), events) = run(|| {
        thread::sync_threads();
        thread::named_barrier_sync(3, 64);
        // SAFETY: the recording simulator does not wait for other lanes.
        unsafe { warp::sync_warp(0xf) };
    });
    assert_eq!(
        events,
        [
            Event::Barrier { id: 0, count: 0, line },
            Event::Barrier { id: 3, count: 64, line: line + 1 },
            Event::SyncWarp { mask: 0xf },
        ]
    );
}

#[test]
fn barriers_with_a_result_count_the_predicates() {
    run(|| {
        assert_eq!(thread::sync_threads_count(5), 1);
        assert_eq!(thread::sync_threads_count(0), 0);
        assert_eq!((thread::sync_threads_and(2), thread::sync_threads_and(0)), (1, 0));
        assert_eq!((thread::sync_threads_or(2), thread::sync_threads_or(0)), (1, 0));
    });
}

#[test]
fn a_shuffle_carries_every_bit_of_its_value() {
    // SAFETY: the recording simulator does not wait for other lanes.
    let ((), events) = run(|| unsafe {
        assert_eq!(warp::shuffle_xor(0x1234_5678u32, 1), !0x1234_5678);
        assert_eq!(warp::shuffle_xor(-7i8, 1), !-7);
        assert_eq!(warp::shuffle_up(0x0123_4567_89ab_cdefu64, 1), !0x0123_4567_89ab_cdef);
        assert_eq!(warp::shuffle_down(1.5f64, 1).to_bits(), !1.5f64.to_bits());
        assert_eq!(warp::shuffle_idx(f16::ONE, 1).to_bits(), !f16::ONE.to_bits());
        assert_eq!(warp::warp_shuffle_idx(0xff, 7i16, 9, 8), (!7, false));
    });
    let shuffle = |mask, mode, lane, width| Event::Shuffle { mask, mode, lane, width };
    assert_eq!(
        events,
        [
            shuffle(u32::MAX, Shuffle::Xor, 1, 32),
            shuffle(u32::MAX, Shuffle::Xor, 1, 32),
            shuffle(u32::MAX, Shuffle::Up, 1, 32),
            shuffle(u32::MAX, Shuffle::Up, 1, 32),
            shuffle(u32::MAX, Shuffle::Down, 1, 32),
            shuffle(u32::MAX, Shuffle::Down, 1, 32),
            shuffle(u32::MAX, Shuffle::Index, 1, 32),
            shuffle(0xff, Shuffle::Index, 9, 8),
        ]
    );
}

#[test]
fn votes_follow_from_the_ballot() {
    // SAFETY: the recording simulator does not wait; lane 0 votes its predicate, other lanes true.
    run(|| unsafe {
        assert_eq!(warp::ballot(false), !1);
        assert!(warp::all(true) && !warp::all(false));
        assert!(warp::warp_vote_any(0b11, false) && !warp::warp_vote_any(1, false));
    });
}

#[test]
fn a_shuffle_refuses_a_width_that_is_no_power_of_two() {
    // SAFETY: the recording simulator does not wait for other lanes.
    let text = panic_of(|| unsafe { _ = warp::warp_shuffle_up(!0, 1u32, 1, 12) });
    assert!(text.contains("power of two"), "{text}");
}

#[test]
fn accesses_are_reported_while_the_thread_is_watched() {
    let mut memory = [Vec16::splat(1.0f32); 2];
    let address = memory.as_mut_ptr().cast::<f32>();
    let line = line!() + 3;
    // SAFETY: all accesses are in `memory`.
    let body = || unsafe {
        let loaded = mem::load(address.add(1));
        mem::store(address, loaded + 1.0);
        mem::store_vec(address.add(4), mem::load_vec(address));
        mem::store_ordered(address, 3.0, Order::Release, Scope::Sys);
        mem::load_ordered(address, Order::Acquire, Scope::Gpu)
    };
    let (loaded, events) = run(body);
    assert_eq!(loaded, 3.0);
    assert_eq!(memory[1].to_bits().map(f32::from_bits), [2.0, 1.0, 1.0, 1.0]);
    let at = |offset: usize, bytes, access, line| {
        let address = address.addr() + 4 * offset;
        Event::Access { address, bytes, access, line }
    };
    assert_eq!(
        events,
        [
            at(1, 4, Access::Read, line),
            at(0, 4, Access::Write, line + 1),
            at(0, 16, Access::Read, line + 2),
            at(4, 16, Access::Write, line + 2),
            at(0, 4, Access::AtomicWrite(Order::Release, Scope::Sys), line + 3),
            // Other threads run before the load, not between its report and the load.
            Event::Spin,
            at(0, 4, Access::AtomicRead(Order::Acquire, Scope::Gpu), line + 4),
        ]
    );
    let (_, events) = run_as(ThreadCtx { watch: false, ..thread() }, body);
    assert_eq!(events, [Event::Spin], "without `watch` only possible polls are reported");
}

#[test]
fn a_misaligned_vector_is_refused_as_a_gpu_would() {
    let memory = [Vec16::splat(1.0f32); 2];
    let address = memory.as_ptr().cast::<f32>().addr() + 4;
    // SAFETY: in `memory`; the misaligned address is rejected before the access.
    let text = panic_of(move || unsafe { _ = mem::load_vec(address as *const f32) });
    assert!(text.contains("misaligned"), "{text}");
}

#[test]
fn what_may_wait_spins_and_what_makes_progress_does_not() {
    let spins = |f: &dyn Fn()| run(f).1.contains(&Event::Spin);
    let word = AtomicU32::new(1);
    let (order, scope) = (Order::Relaxed, Scope::Gpu);
    assert!(spins(&|| _ = word.load(order, scope)));
    assert!(spins(&|| _ = word.swap(1, order, scope)), "as at a lock that is held");
    assert!(spins(&|| _ = word.compare_exchange(0, 1, order, scope)));
    assert!(!spins(&|| _ = word.compare_exchange(1, 0, order, scope)));
    assert!(!spins(&|| _ = word.fetch_add(1, order, scope)));
    assert!(!spins(&|| word.store(1, order, scope)));
    assert!(spins(&|| thread::nanosleep(20)));
    // SAFETY: the atomic's own address.
    assert!(spins(&|| _ = unsafe { mem::load_volatile(word.as_ptr()) }));
}

#[test]
fn atomics_compute_in_their_own_type() {
    let (order, scope) = (Order::AcqRel, Scope::Sys);
    run(|| {
        let word = AtomicU32::new(7);
        assert_eq!(word.fetch_sub(8, order, scope), 7);
        assert_eq!(word.fetch_and(0xff, order, scope), u32::MAX);
        assert_eq!(word.fetch_or(0x100, order, scope), 0xff);
        assert_eq!(word.fetch_xor(1, order, scope), 0x1ff);
        assert_eq!(word.fetch_min(3, order, scope), 0x1fe);
        assert_eq!(word.fetch_max(5, order, scope), 3);
        assert_eq!(word.compare_exchange(4, 9, order, scope), Err(5));
        assert_eq!(word.compare_exchange(5, 9, order, scope), Ok(5));
        assert_eq!(word.swap(1, order, scope), 9);
        assert_eq!(word.load(Order::SeqCst, scope), 1);

        let signed = AtomicI32::new(i32::MAX);
        assert_eq!(signed.fetch_add(1, order, scope), i32::MAX);
        assert_eq!(signed.fetch_max(-1, order, scope), i32::MIN);
        assert_eq!(signed.fetch_min(-2, order, scope), -1);
        assert_eq!(signed.load(Order::Acquire, scope), -2);

        let wide = AtomicU64::new(1 << 40);
        assert_eq!(wide.fetch_add(1, order, scope), 1 << 40);
        assert_eq!(wide.fetch_max(u64::MAX, order, scope), (1 << 40) + 1);
        let wide = AtomicI64::new(-1);
        assert_eq!(wide.fetch_min(-5, order, scope), -1);
        assert_eq!(wide.fetch_xor(-1, order, scope), -5);
        assert_eq!(wide.load(Order::Relaxed, scope), 4);

        let float = AtomicF32::new(1.5);
        assert_eq!(float.fetch_add(2.0, order, scope), 1.5);
        assert_eq!(float.swap(0.25, order, scope), 3.5);
        let float = AtomicF64::new(1.5);
        assert_eq!(float.fetch_add(2.0, order, scope), 1.5);
        assert_eq!(float.load(Order::Relaxed, scope), 3.5);
    });
}

#[test]
fn an_atomic_reports_its_order_and_scope() {
    let word = AtomicU32::new(0);
    let ((), events) = run(|| {
        word.fetch_add(1, Order::Release, Scope::Cta);
        fence(Order::SeqCst, Scope::Sys);
        thread::device_fence();
    });
    let [Event::Access { bytes: 4, access, .. }, fences @ ..] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(*access, Access::AtomicRmw(Order::Release, Scope::Cta));
    let expected =
        [Event::Fence(Order::SeqCst, Scope::Sys), Event::Fence(Order::SeqCst, Scope::Gpu)];
    assert_eq!(fences, expected);
}

#[test]
fn an_order_that_an_access_cannot_have_is_refused() {
    static WORD: AtomicU32 = AtomicU32::new(0);
    let load = panic_of(|| _ = WORD.load(Order::Release, Scope::Gpu));
    let store = panic_of(|| WORD.store(1, Order::AcqRel, Scope::Gpu));
    let fence = panic_of(|| fence(Order::Relaxed, Scope::Gpu));
    for (text, what) in [(load, "a load is"), (store, "a store is"), (fence, "no relaxed fence")] {
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn each_shared_array_of_a_block_is_one_array() {
    fn first() -> *mut f32 {
        shared_array![f32; 40]
    }
    run(|| {
        let second = shared_array![f32; 40];
        assert_eq!(first(), first());
        assert_ne!(first(), second);
        assert!(second.cast::<u128>().is_aligned());
    });
}

#[test]
fn dynamic_shared_memory_is_the_launchs() {
    let mut memory = [0u128; 4];
    let bytes = (memory.as_mut_ptr().cast::<u8>(), size_of_val(&memory));
    run_as(ThreadCtx { dynamic_shared: bytes, ..thread() }, || {
        assert_eq!(shared::dynamic_shared_mem::<u8>(), bytes.0);
        assert_eq!(shared::dynamic_shared_mem_size(), 64);
    });
}

#[test]
fn printing_gives_the_simulator_one_text_a_call() {
    let ((), events) = run(|| {
        let sum = 1.5f32;
        println!("{{{sum}}} of {} is {:?}, 100%", 7u8, true);
        print!("{} {}", -3i64, f16::from_f32(0.5));
        println!();
    });
    let texts = ["{1.5} of 7 is true, 100%\n", "-3 0.5", "\n"];
    assert_eq!(events, texts.map(|text| Event::Print(text.to_owned())));
}

#[test]
fn maths_is_the_standard_librarys() {
    assert_eq!(math::fma(2.0, 3.0, 1.0), 7.0);
    assert_eq!((math::recip(4.0), math::rsqrt(16.0)), (0.25, 0.25));
    assert_eq!(math::exp2(3.0), 8.0);
    assert_eq!(math::log2(8.0), 3.0);
    assert!((math::exp(1.0) - std::f32::consts::E).abs() < 1e-6);
    assert!((math::ln(std::f32::consts::E) - 1.0).abs() < 1e-6);
    assert_eq!((math::sin(0.0), math::cos(0.0), math::tanh(0.0)), (0.0, 1.0, 0.0));
    assert_eq!(GpuFloat::round(-2.5f64), -3.0);
    assert_eq!(GpuFloat::fract(-2.25f32), -0.25);
    assert_eq!(GpuFloat::mul_add(2.0f64, 3.0, 1.0), 7.0);
}

#[test]
fn parts_follow_each_other_and_cover_everything() {
    for parts in 1..9 {
        for count in [0, 1, 2, 7, 8, 9, 1000] {
            let mut next = 0;
            for index in 0..parts {
                let (first, len) = share(count, index, parts);
                assert_eq!(first, next);
                assert!(len == count / parts || len == count / parts + 1);
                next += len;
            }
            assert_eq!(next, count);
        }
    }
}
