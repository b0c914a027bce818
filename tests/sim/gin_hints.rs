//! Tests of the repairs that reports of races with transfers over the network name. As in
//! [`hints`](crate::hints), each repair that a hint names ends the reports.

use cuda_std::atomic::{Order, Scope, fence};
use cuda_std::prelude::*;
use devcomm::{Buffer, Simulation};
use nccl_device::gin::Proxy;
use nccl_device::{BarrierIndex, Coop, DevComm, MemoryOrder, Window};

use crate::common::full;
use crate::hints::check;

/// Rank 0 puts element 0 to rank 1's element 1, and a thread stores element 0: the one that puts
/// (`by` 0), another one of rank 0 (1), or one of rank 1 (2). Repairs: the store and a barrier of
/// both threads before the put; a flush after the put, or a wait for its counter, and then the
/// barrier before the store.
#[kernel]
unsafe fn puts_what_is_stored(comm: DevComm, words: Window<u32>, by: u32, repair: u32) {
    let (gin, coop) = (comm.gin::<Proxy>(0), Coop::cta());
    let (team, rank, counter) = (comm.world_team(), comm.rank(), comm.counter(0));
    let mut ranks = comm.lsa_barrier(coop, BarrierIndex::this_block());
    let is_first = thread::thread_idx_x() == 0;
    let stores = rank == (by / 2) as i32 && is_first == (by != 1);
    let mut meet = || match by {
        0 => {}
        1 => thread::sync_threads(),
        _ => ranks.sync(MemoryOrder::AcqRel),
    };
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        let store = || words.lsa(0).store(0, 1);
        if stores && repair == 1 {
            store();
        }
        if repair == 1 {
            meet();
        }
        if rank == 0 && is_first {
            let put = gin.put(team, 1, words.at(1), words.at(0), 1);
            put.counter(counter).post(Coop::thread());
            match repair {
                2 => gin.flush(Coop::thread(), MemoryOrder::Relaxed),
                3 => gin.wait_counter(Coop::thread(), counter, 1, MemoryOrder::Relaxed),
                _ => {}
            }
        }
        if repair >= 2 {
            meet();
        }
        if stores && repair != 1 {
            store();
        }
    }
    gin.flush(coop, MemoryOrder::Relaxed);
}

#[test]
fn what_a_put_sends_is_stored_before_it_or_after_its_flush_or_counter() {
    const FLUSH: &str = "a flush (`gin.flush`) after the put";
    const COUNTER: &str = "a wait for its counter";
    for (by, order) in [
        (1, "a barrier of both threads is missing before the put"),
        (2, "a barrier of the ranks is missing before the put"),
    ] {
        check(&Simulation::new(2), &[order, FLUSH, COUNTER], |gpu, repair| {
            let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
            gpu.launch(puts_what_is_stored::args(&comm, &words, by, repair).grid(1).block(2))
        });
    }
    check(&Simulation::new(2), &[FLUSH, COUNTER], |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        // One thread needs no barrier, which is repair 1.
        let repair = if repair == 0 { 0 } else { repair + 1 };
        gpu.launch(puts_what_is_stored::args(&comm, &words, 0, repair).grid(1).block(2))
    });
}

/// Rank 0 puts what it has stored, without a release by NCCL. Repair: a fence.
#[kernel]
unsafe fn puts_what_it_has_released(comm: DevComm, words: Window<u32>, repair: u32) {
    let gin = comm.gin::<Proxy>(0);
    if comm.rank() == 0 {
        // SAFETY: the window has two elements; the races are what the tests are for.
        unsafe {
            words.local().store(0, 1);
            if repair == 1 {
                fence(Order::AcqRel, Scope::Sys);
            }
            let put = gin.put(comm.world_team(), 1, words.at(1), words.at(0), 1);
            put.released_to(Scope::Sys).post(Coop::thread());
        }
    }
    gin.flush(Coop::thread(), MemoryOrder::Relaxed);
}

#[test]
fn a_put_that_releases_nothing_comes_after_a_fence() {
    check(&Simulation::new(2), &["a fence at system scope"], |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_what_it_has_released::args(&comm, &words, repair).grid(1).block(1))
    });
}

#[test]
fn what_a_put_sends_is_filled_in_its_stream_or_in_one_that_an_event_orders() {
    let named = ["a stream, or an event, that orders both", "a flush (`gin.flush`) after the put"];
    check(&Simulation::new(2), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        let (one, two) = (gpu.stream()?, gpu.stream()?);
        let event = gpu.context().event()?;
        let fill = || one.fill(&words.slice(..1)?, 1_u32);
        if repair < 2 {
            fill()?;
        }
        if repair == 1 {
            one.record(&event)?;
            two.wait_event(&event)?;
        }
        let puts = puts_for_itself::args(&comm, &words);
        // SAFETY: the window has two elements.
        unsafe { puts.grid(1).block(1).launch(&two)? };
        if repair == 2 {
            two.record(&event)?;
            one.wait_event(&event)?;
            fill()?;
        }
        two.synchronize()?;
        one.synchronize()?;
        gpu.barrier()
    });
}

/// Each rank puts its element 0 to its element 1.
#[kernel]
unsafe fn puts_for_itself(comm: DevComm, words: Window<u32>) {
    let gin = comm.gin::<Proxy>(0);
    let team = comm.world_team();
    // SAFETY: the window has two elements.
    unsafe { gin.put(team, team.rank, words.at(1), words.at(0), 1).post(Coop::thread()) };
    gin.flush(Coop::thread(), MemoryOrder::Relaxed);
}

/// Rank 0 puts to rank 1, which loads. Repairs: a wait for the signal; a barrier, or a signal,
/// between the load and the put.
#[kernel]
unsafe fn puts_what_is_loaded(comm: DevComm, words: Window<u32>, repair: u32) {
    let (gin, one) = (comm.gin::<Proxy>(0), Coop::thread());
    let (team, arrived, loaded) = (comm.world_team(), comm.signal(0), comm.signal(1));
    let mut ranks = comm.lsa_barrier(one, BarrierIndex::this_block());
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        if comm.rank() == 1 {
            if repair == 1 {
                gin.wait_signal(one, arrived, 1, MemoryOrder::Acquire);
            }
            words.local().load(1);
            match repair {
                2 => ranks.sync(MemoryOrder::AcqRel),
                3 => gin.signal(one, team, 0, loaded.inc()),
                _ => {}
            }
        } else {
            match repair {
                2 => ranks.sync(MemoryOrder::AcqRel),
                3 => gin.wait_signal(one, loaded, 1, MemoryOrder::Acquire),
                _ => {}
            }
            gin.put(team, 1, words.at(1), words.at(0), 1).signal(arrived.inc()).post(one);
            gin.flush(one, MemoryOrder::Relaxed);
        }
    }
}

#[test]
fn what_a_put_writes_is_loaded_after_its_signal_or_before_it_is_posted() {
    let named = ["a wait for the put's signal", "a barrier of the ranks", "or a signal between"];
    check(&Simulation::new(2), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_what_is_loaded::args(&comm, &words, repair).grid(1).block(1))
    });
}

/// Rank 0 gets rank 1's element, and loads it. Repairs: a flush, a wait for the request.
#[kernel]
unsafe fn gets_and_loads(comm: DevComm, words: Window<u32>, repair: u32) {
    let (gin, one, team) = (comm.gin::<Proxy>(0), Coop::thread(), comm.world_team());
    if comm.rank() == 0 {
        // SAFETY: the window has two elements; the races are what the tests are for.
        unsafe { gin.get(team, 1, words.at(0), words.at(1), 1).post(one) };
        match repair {
            1 => gin.flush(one, MemoryOrder::Acquire),
            2 => gin.wait_request(gin.flush_async(team, 1), MemoryOrder::Acquire),
            _ => {}
        }
        // SAFETY: the window has two elements; the races are what the tests are for.
        unsafe { words.local().load(1) };
        gin.flush(one, MemoryOrder::Relaxed);
    }
}

/// Rank 1 stores an element, and rank 0 gets it. Repairs: a barrier after the store; a barrier
/// after the get and its flush.
#[kernel]
unsafe fn gets_what_is_stored(comm: DevComm, words: Window<u32>, repair: u32) {
    let (gin, one, team) = (comm.gin::<Proxy>(0), Coop::thread(), comm.world_team());
    let mut ranks = comm.lsa_barrier(one, BarrierIndex::this_block());
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        if comm.rank() == 0 {
            if repair == 1 {
                ranks.sync(MemoryOrder::AcqRel);
            }
            gin.get(team, 1, words.at(0), words.at(1), 1).post(one);
            gin.flush(one, MemoryOrder::Acquire);
            if repair == 2 {
                ranks.sync(MemoryOrder::AcqRel);
            }
        } else {
            if repair == 2 {
                ranks.sync(MemoryOrder::AcqRel);
            }
            words.local().store(0, 1);
            if repair == 1 {
                ranks.sync(MemoryOrder::AcqRel);
            }
        }
    }
}

#[test]
fn what_a_get_moves_is_there_after_its_flush_and_stays_until_then() {
    let named = ["a flush (`gin.flush`) after the get", "a wait for its request"];
    check(&Simulation::new(2), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(gets_and_loads::args(&comm, &words, repair).grid(1).block(1))
    });
    let named = ["between the store and the get", "between the get's flush and the store"];
    check(&Simulation::new(2), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(gets_what_is_stored::args(&comm, &words, repair).grid(1).block(1))
    });
}

/// Rank 0 puts to rank 1, and rank 1 puts the same element to rank 2. Repairs: rank 1 waits for the
/// first put's signal; rank 0 waits for a signal that rank 1 sends after it has flushed its put.
#[kernel]
unsafe fn puts_on(comm: DevComm, words: Window<u32>, repair: u32) {
    let (gin, one) = (comm.gin::<Proxy>(0), Coop::thread());
    let (team, arrived, flushed) = (comm.world_team(), comm.signal(0), comm.signal(1));
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        if team.rank == 0 {
            if repair == 2 {
                gin.wait_signal(one, flushed, 1, MemoryOrder::Acquire);
            }
            gin.put(team, 1, words.at(1), words.at(0), 1).signal(arrived.inc()).post(one);
            gin.flush(one, MemoryOrder::Relaxed);
        } else if team.rank == 1 {
            if repair == 1 {
                gin.wait_signal(one, arrived, 1, MemoryOrder::Acquire);
            }
            gin.put(team, 2, words.at(1), words.at(1), 1).post(one);
            gin.flush(one, MemoryOrder::Relaxed);
            if repair == 2 {
                gin.signal(one, team, 0, flushed.inc());
            }
        }
    }
}

/// Ranks 0 and 1 put to the same element of rank 2. Repairs: rank 2 waits for the first put's
/// signal, and then a barrier, or a signal, lets rank 1 post the second one.
#[kernel]
unsafe fn puts_to_one(comm: DevComm, words: Window<u32>, repair: u32) {
    let (gin, one) = (comm.gin::<Proxy>(0), Coop::thread());
    let (team, arrived, free) = (comm.world_team(), comm.signal(0), comm.signal(1));
    let mut ranks = comm.lsa_barrier(one, BarrierIndex::this_block());
    // SAFETY: the window has two elements; the races are what the tests are for.
    unsafe {
        let put = || gin.put(team, 2, words.at(1), words.at(0), 1).signal(arrived.inc()).post(one);
        if team.rank == 0 {
            put();
        }
        if team.rank == 2 && repair != 0 {
            gin.wait_signal(one, arrived, 1, MemoryOrder::Acquire);
        }
        match (repair, team.rank) {
            (1, _) => ranks.sync(MemoryOrder::AcqRel),
            (2, 2) => gin.signal(one, team, 1, free.inc()),
            (2, 1) => gin.wait_signal(one, free, 1, MemoryOrder::Acquire),
            _ => {}
        }
        if team.rank == 1 {
            put();
        }
    }
    gin.flush(one, MemoryOrder::Relaxed);
}

#[test]
fn the_second_of_two_transfers_is_posted_after_the_end_of_the_first() {
    let named = ["for a put's signal, with an acquire", "for a put's counter, or a flush"];
    check(&Simulation::new(3), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_on::args(&comm, &words, repair).grid(1).block(1))
    });
    let named = ["also a barrier of the ranks", "or a signal, after the wait"];
    check(&Simulation::new(3), &named, |gpu, repair| {
        let (comm, words) = (gpu.dev_comm(full())?, gpu.window(&[0_u32; 2])?);
        gpu.launch(puts_to_one::args(&comm, &words, repair).grid(1).block(1))
    });
}
