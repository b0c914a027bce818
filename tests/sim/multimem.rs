//! Tests of multicast (multimem) addresses: the memory they refer to, and reports of misuse.

use core::mem::MaybeUninit;
use core::panic::Location;
use devcomm_types::Kernel;

use crate::common::*;
use cuda_std::arch::{Access, CTX, MulticastParts};
use cuda_std::atomic::{Atomic, Order, Scope};
use cuda_std::multimem;
use cuda_std::prelude::*;
use cuda_std::reduce::Sum;
use devcomm::sim::{Change, Error, Mutation, Waiting};
use devcomm::{DevCommRequirements, ResourceBuffer, Simulation, TeamMultimem};
use devcomm_testing::simulated::{Gpu, failure, read, run, simulate, world};
use nccl_device::raw::{self, LsaBarrierSession, MultimemHandle, Team};
use nccl_device::{DevComm, Window};

/// Returns the addresses, one per rank of the team, that a `multimem` instruction on `address`
/// accesses.
#[track_caller]
fn addresses<T>(address: *mut T, access: fn(Order, Scope) -> Access) -> Vec<*mut T> {
    let context = CTX.get();
    // SAFETY: a kernel runs, so its context is live.
    let ops = unsafe { (*context).ops };
    let (at, access) = (Location::caller(), access(Order::Relaxed, Scope::Sys));
    let MulticastParts { first, stride, n } =
        (ops.multimem)(context, address.addr(), size_of::<T>(), access, at);
    (0..n).map(|i| first.wrapping_add(i * stride).cast()).collect()
}

/// Stores to all ranks' memory, as a `multimem` instruction does.
#[track_caller]
fn store_all(address: *mut u32, value: u32) {
    // SAFETY: the simulator has checked the addresses.
    addresses(address, Access::AtomicWrite)
        .into_iter()
        .for_each(|part| unsafe { part.write(value) });
}

/// Sums over all ranks' memory, as a `multimem` instruction does.
#[track_caller]
fn sum(address: *mut u32) -> u32 {
    // SAFETY: the simulator has checked the addresses.
    addresses(address, Access::AtomicRead).into_iter().map(|part| unsafe { part.read() }).sum()
}

/// Each rank stores its rank plus 1 to its whole LSA team, in a window and a resource buffer.
#[kernel]
unsafe fn stores_to_all(comm: DevComm, out: Window<u32>, buffer: u32) {
    let (comm, me) = (comm.as_raw(), comm.rank() as usize);
    // SAFETY: the window has one element per rank plus one, the buffer one element per rank.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 4 * me, comm).cast::<u32>();
        let by_handle = raw::ncclGetMultimemPointer(handle(&out), 4 * me, &comm.lsa_multimem);
        assert_eq!(all, by_handle.cast());
        store_all(all, me as u32 + 1);
        let all = raw::ncclGetResourceBufferLsaMultimemPointer(comm, buffer).cast::<u32>();
        let by_handle = raw::ncclGetResourceBufferMultimemPointer(comm, buffer, &comm.lsa_multimem);
        assert_eq!(all, by_handle.cast());
        store_all(all.wrapping_add(me), me as u32 + 1);
    }
}

/// Records sums over the LSA team of the elements that its first rank stored.
#[kernel]
unsafe fn sums_all(comm: DevComm, out: Window<u32>, buffer: u32, ranks: usize) {
    let comm = comm.as_raw();
    let first = (comm.rank - comm.lsa_rank) as usize;
    // SAFETY: the windows have the elements, and the resource buffer too.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 4 * first, comm).cast();
        let again = raw::ncclGetResourceBufferLsaMultimemPointer(comm, buffer).cast::<u32>();
        let total = sum(all) + 1000 * sum(again.wrapping_add(first));
        out.local().store(ranks, total);
    }
}

#[test]
fn a_multicast_address_is_every_members_copy() {
    let seen = simulate(Simulation::new(6).team_size(3), |gpu| {
        let mut requirements = requirements();
        let key = requirements.add(ResourceBuffer { bytes: 24, align: 128 });
        let comm = gpu.dev_comm(requirements)?;
        let buffer = comm.resource(key)?;
        // `out` is not the first window in the multicast group.
        let (_other, out) = (gpu.window(&[0_u32; 1000])?, gpu.window(&[0_u32; 7])?);
        gpu.launch(stores_to_all::args(&comm, &out, buffer).grid(1).block(1))?;
        gpu.launch(sums_all::args(&comm, &out, buffer, 6_usize).grid(1).block(1))?;
        read(&out)
    });
    for (rank, seen) in seen.into_iter().enumerate() {
        let want = if rank < 3 { [1, 2, 3, 0, 0, 0, 3003] } else { [0, 0, 0, 4, 5, 6, 12012] };
        assert_eq!(seen, want);
    }
}

/// Stores to all ranks of the team with multicast base `base`.
#[kernel]
unsafe fn stores_to_team(comm: DevComm, out: Window<u32>, base: u64) {
    let team = MultimemHandle { base: core::ptr::without_provenance_mut(base as usize) };
    let me = comm.rank() as usize;
    // SAFETY: the window has an element per rank.
    let all = unsafe { raw::ncclGetMultimemPointer(handle(&out), 4 * me, &team) };
    store_all(all.cast(), 1);
}

#[test]
fn teams_have_multicast_of_their_own() {
    let store = |gpu: &Gpu<'_>, base_of: Option<usize>| {
        let mut requirements = DevCommRequirements::new().lsa_barriers(1);
        let (lsa, me) = (gpu.communicator()?.team_lsa()?, gpu.rank());
        let team = Team { n_ranks: 2, rank: lsa.rank / 2, stride: 2 };
        let key = requirements.add(TeamMultimem { team, multimem: true });
        let (comm, out) = (gpu.dev_comm(requirements)?, gpu.window(&[0_u32; 8])?);
        let base = comm.resource(key)?.map_or(0, |team| team.base.addr() as u64);
        let bases = gpu.all_gather(&base.to_ne_bytes())?;
        let base = bases[base_of.unwrap_or(me)].clone();
        let base = u64::from_ne_bytes(base.try_into().unwrap());
        gpu.launch(stores_to_team::args(&comm, &out, base).grid(1).block(1))?;
        read(&out)
    };
    let simulation = Simulation::new(8).team_size(4);
    for (rank, got) in simulate(simulation.clone(), |gpu| store(gpu, None)).iter().enumerate() {
        let mut want = [0; 8];
        (want[rank], want[rank ^ 2]) = (1, 1);
        assert_eq!(got[..], want, "rank {rank}");
    }
    // A rank cannot use the multicast address of another team.
    let error = failure(simulation, |gpu| store(gpu, Some(1)).map(drop));
    assert!(error.to_string().contains("is in a multicast group without rank"), "{error}");
}

/// Makes the mistake with number `which`.
#[kernel]
unsafe fn mistakes_with_multimem(comm: DevComm, out: Window<u32>, which: u32) {
    let comm = comm.as_raw();
    // SAFETY: the simulator reports misuse.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 0, comm).cast::<u32>();
        match which {
            0 => mem::store(all, 1),
            1 => drop(mem::load(all)),
            2 => drop(sum(out.local().as_ptr())),
            3 => store_all(all.add(2), 1),
            4 => drop(addresses(all.add(1).cast::<u64>(), Access::AtomicRead)),
            _ => all.write_volatile(1),
        }
    }
}

#[test]
fn misuse_of_multicast_addresses_is_reported() {
    // Simulated multicast addresses begin with 0x4.
    let wants = [
        "stores 4 bytes at 0x4",
        "loads 4 bytes at 0x4",
        "is not a multicast address",
        "4 bytes at multicast offset 8 of memory of 8 bytes",
        "8 bytes at multicast offset 4 of memory of 8 bytes",
    ];
    let report = |requirements: &DevCommRequirements, which: u32| {
        failure(Simulation::new(2), |gpu| {
            let (comm, out) = (gpu.dev_comm(requirements.clone())?, gpu.window(&[0_u32; 2])?);
            gpu.launch(mistakes_with_multimem::args(&comm, &out, which).grid(1).block(1))
        })
    };
    for (which, want) in (0..).zip(wants) {
        let error = report(&requirements(), which);
        assert!(matches!(*error, Error::Misuse { .. }), "{error}");
        assert!(error.to_string().contains(want), "{error}");
        assert!(error.to_string().contains("multimem.rs"), "{error}");
    }
    let error = report(&requirements(), 5);
    assert!(matches!(*error, Error::Fault { .. }), "{error}");
    let error = report(&DevCommRequirements::new().lsa_barriers(1), 0);
    assert!(error.to_string().contains("no multicast for the team"), "{error}");
}

/// All ranks but `absent` store before an LSA barrier over multimem, and load after it.
#[kernel]
unsafe fn meets_by_multimem(comm: DevComm, out: Window<u32>, rounds: u32, absent: i32) {
    let comm = comm.as_raw();
    let (team, coop) = (comm.lsa_team(), cta());
    let mut session = MaybeUninit::<LsaBarrierSession>::uninit();
    let session = session.as_mut_ptr();
    if comm.rank == absent {
        return;
    }
    let (barriers, all) = (&comm.lsa_barrier, &comm.lsa_multimem);
    // SAFETY: the window has an element per rank.
    unsafe {
        raw::ncclLsaBarrierSessionInit(session, &coop, comm, &team, barriers, 0, true, all);
        for round in 1..=rounds {
            if thread::thread_idx_x() == 0 {
                out.local().store(0, round);
            }
            raw::ncclLsaBarrierSessionSync(session, &coop, ACQ_REL);
            for peer in 0..team.n_ranks {
                assert_eq!(out.lsa(peer).load(0), round);
            }
            raw::ncclLsaBarrierSessionSync(session, &coop, ACQ_REL);
        }
        raw::ncclLsaBarrierSessionDestroy(session);
    }
}

fn requirements() -> DevCommRequirements {
    DevCommRequirements::new().lsa_barriers(1).lsa_multimem(true)
}

#[test]
fn an_lsa_barrier_over_multimem_meets_everyone() {
    for seed in 0..50 {
        let world = world(Simulation::new(6).team_size(3).seed(seed));
        let met = run(&world, |gpu| {
            let args = (&gpu.dev_comm(requirements())?, &gpu.window(&[0_u32])?, 3_u32, -1);
            (0..2).try_for_each(|_| gpu.launch(meets_by_multimem::with_args(args).grid(1).block(2)))
        });
        met.unwrap();
        assert!(world.simulated_machine().unwrap().activity().open_sessions.is_empty());
    }
}

#[test]
fn an_lsa_barrier_over_multimem_says_what_it_waits_for() {
    let failure_with = |requirements: &DevCommRequirements| {
        failure(Simulation::new(3), |gpu| {
            let comm = gpu.dev_comm(requirements.clone())?;
            gpu.launch(
                meets_by_multimem::args(&comm, &gpu.window(&[0_u32])?, 1_u32, 2).grid(1).block(1),
            )
        })
    };
    let error = failure_with(&requirements());
    let Error::Deadlock(stall) = &*error else { panic!("{error}") };
    assert!(stall.waiters.iter().all(|w| matches!(w.what, Waiting::For(_))));
    let error = failure_with(&requirements().lsa_multimem(false));
    assert!(error.to_string().contains("the multimem handle is NULL"), "{error}");
}

/// Waits for a sum that no rank stores.
#[kernel]
unsafe fn polls_all(comm: DevComm, out: Window<u32>) {
    // SAFETY: the window has an element in each rank.
    unsafe {
        let all = raw::ncclGetLsaMultimemPointer(handle(&out), 0, comm.as_raw()).cast::<u32>();
        while multimem::load_reduce_ordered(Sum, all, Order::Relaxed, Scope::Sys) != 1 {}
    }
}

#[test]
fn a_poll_by_a_reducing_load_is_no_progress() {
    // Five copies are more addresses than a polling thread may access in turn.
    let simulations = [Simulation::new(2), Simulation::new(2).preempt(true), Simulation::new(5)];
    for simulation in simulations {
        let error = failure(simulation.step_limit(1 << 22), |gpu| {
            let comm = gpu.dev_comm(requirements())?;
            gpu.launch(polls_all::args(&comm, &gpu.window(&[0_u32])?).grid(1).block(1))
        });
        assert!(error.to_string().starts_with("livelock in polls_all"), "{error}");
    }
}

/// Rank 0 stores 7 to the first word of all copies, and returns the sum of their second words.
#[kernel]
unsafe fn stores_and_sums(comm: DevComm, words: Window<u32>, sum: *mut u32) {
    if comm.rank() == 0 {
        // SAFETY: the window has three words and the buffer has one; the team has multicast.
        unsafe {
            let all = words.multimem(&comm);
            multimem::store(all, 7); // changed
            let of_all = multimem::load_reduce(Sum, all.wrapping_add(1)); // changed too
            mem::store(sum, of_all);
        }
    }
}

#[test]
fn a_mutation_changes_what_multimem_instructions_access() {
    let run = |text: &str, change: Option<Change>| {
        let mut lines = include_str!("multimem.rs").lines();
        let line = 1 + lines.position(|line| line.ends_with(text)).unwrap() as u32;
        let simulation = Simulation::new(2);
        let simulation = match change {
            Some(change) => simulation.mutation(Mutation::new("multimem.rs", line, change)),
            None => simulation,
        };
        let out = simulate(simulation, |gpu| {
            let (words, sum) = (gpu.window(&[0_u32, 4, 5])?, gpu.buffer(&[0_u32])?);
            let comm = gpu.dev_comm(requirements())?;
            gpu.launch(stores_and_sums::args(&comm, &words, &sum).grid(1).block(1))?;
            Ok((read(&words)?, read(&sum)?[0]))
        });
        assert_eq!(out[0].0, out[1].0);
        (out[0].0.clone(), out[0].1)
    };
    assert_eq!(run("// changed", None), (vec![7, 4, 5], 8));
    assert_eq!(run("// changed", Some(Change::Remove)), (vec![0, 4, 5], 8));
    assert_eq!(run("// changed", Some(Change::Shift(2))), (vec![0, 4, 7], 8));
    assert_eq!(run("// changed too", Some(Change::Remove)), (vec![7, 4, 5], 0));
    assert_eq!(run("// changed too", Some(Change::Shift(1))), (vec![7, 4, 5], 10));
}

/// Two blocks of rank 0 store different numbers to a flag, one of them after data, in all copies.
/// When both are done, a third one loads the data if the flag has that one's number.
#[kernel]
unsafe fn stores_beside_another(comm: DevComm, words: Window<u32>) {
    if comm.rank() > 0 {
        return;
    }
    // SAFETY: the window has three words; the team has multicast.
    unsafe {
        let [data, flag, done] = [0, 1, 2].map(|at| words.local().as_ptr().wrapping_add(at));
        let [flag, done] = [flag, done].map(|word| Atomic::from_ptr(word));
        match thread::block_idx_x() {
            0 => {
                mem::store(data, 7);
                let all = words.multimem(&comm).wrapping_add(1);
                multimem::store_ordered(all, 1, Order::Release, Scope::Sys);
            }
            1 => flag.store(2, Order::Relaxed, Scope::Sys),
            _ => {
                while done.load(Order::Relaxed, Scope::Sys) < 2 {}
                if flag.load(Order::Acquire, Scope::Sys) == 1 {
                    assert_eq!(mem::load(data), 7);
                }
                return;
            }
        }
        done.fetch_add(1, Order::Relaxed, Scope::Sys);
    }
}

#[test]
fn no_other_thread_runs_during_a_multimem_store() {
    for seed in 0..32 {
        simulate(Simulation::new(2).seed(seed).preempt(true), |gpu| {
            let words = gpu.window(&[0_u32; 3])?;
            let comm = gpu.dev_comm(requirements())?;
            gpu.launch(stores_beside_another::args(&comm, &words).grid(3).block(1))
        });
    }
}

/// Rank 0 passes a number on by a flag in all copies, which rank 1 loads from all copies.
#[kernel]
unsafe fn passes_on_to_all(comm: DevComm, words: Window<u32>) {
    let flag = words.multimem(&comm).wrapping_add(1);
    // SAFETY: the window has two words; the team has multicast.
    unsafe {
        if comm.rank() == 0 {
            words.lsa(1).store(0, 7);
            multimem::store_ordered(flag, 1, Order::Release, Scope::Sys);
        } else {
            while multimem::load_reduce_ordered(Sum, flag, Order::Acquire, Scope::Sys) < 2 {}
            assert_eq!(words.local().load(0), 7);
        }
    }
}

#[test]
fn a_multimem_load_acquires_what_the_values_that_it_sees_release() {
    for seed in 0..16 {
        simulate(Simulation::new(2).seed(seed).weak(true), |gpu| {
            let words = gpu.window(&[0_u32; 2])?;
            let comm = gpu.dev_comm(DevCommRequirements::new().lsa_multimem(true))?;
            gpu.launch(passes_on_to_all::args(&comm, &words).grid(1).block(1))
        });
    }
}
