//! Tests of subsets of the ranks, and of their exchanges.

use std::thread;

use super::*;
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::run::run_threads;

/// Runs `f` on every rank of two worlds, one of threads in memory and one over TCP.
fn worlds(n: usize, f: impl Fn(&Rendezvous) -> Result<()> + Sync) {
    run_threads(&Machine::Gpus, n, None, &f).unwrap();
    for result in together(&configs(n, AMPLE), |_, rendezvous| f(&rendezvous?)) {
        result.unwrap();
    }
}

/// Gathers from every rank of the subset `word` with the rank's number in the world, and checks the
/// result. `own` is this rank's number in the world, and `members` are those of the subset.
fn exchange(subset: &Rendezvous, own: usize, members: &[usize], word: &str) -> Result<()> {
    let all = subset.all_gather(format!("{word} {own}").as_bytes())?;
    let expected: Vec<_> =
        members.iter().map(|rank| format!("{word} {rank}").into_bytes()).collect();
    assert_eq!(*all, expected);
    Ok(())
}

#[test]
fn a_subset_has_its_own_ranks_in_the_order_asked_for() {
    worlds(5, |world| {
        let own = world.rank();
        let members = [3, 0, 4];
        if let Some(index) = members.iter().position(|&rank| rank == own) {
            let subset = world.subset(&members)?;
            assert_eq!((subset.rank(), subset.n_ranks()), (index, 3));
            let hosts: Vec<_> = members.iter().map(|&rank| world.hosts()[rank].clone()).collect();
            assert_eq!(subset.hosts(), hosts);
            exchange(&subset, own, &members, "own")?;
            assert_eq!(subset.broadcast(2, format!("from {own}").as_bytes())?, b"from 4");
            assert!(subset.broadcast(3, b"").is_err());
            subset.barrier()?;
        } else {
            let error = world.subset(&members).err().unwrap();
            assert!(matches!(error, Error::InvalidInput { .. }), "{error}");
        }
        world.finish()
    });
}

#[test]
fn subsets_exchange_each_at_its_own_pace() {
    worlds(5, |world| {
        let own = world.rank();
        // Where ranks are processes, rank 0 has the hub, through which all exchanges go. Here it is
        // in one of the two subsets only, and the hub must serve the other one too.
        let members: &[usize] = if own % 2 == 0 { &[4, 2, 0] } else { &[1, 3] };
        let subset = world.subset(members)?;
        for round in 0..if own % 2 == 0 { 3 } else { 200 } {
            exchange(&subset, own, members, &round.to_string())?;
        }
        let alone = world.subset(&[own])?;
        exchange(&alone, own, &[own], "alone")?;
        exchange(world, own, &[0, 1, 2, 3, 4], "world")?;
        world.finish()
    });
}

#[test]
fn two_subsets_of_the_same_ranks_do_not_mix_up_their_exchanges() {
    worlds(3, |world| {
        let (own, members) = (world.rank(), [2, 0, 1]);
        let (first, second) = (world.subset(&members)?, world.subset(&members)?);
        // The order of the two subsets' exchanges differs between ranks and rounds.
        let run = |subset: &Rendezvous, word| {
            (0..100).try_for_each(|_| exchange(subset, own, &members, word))
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| run(&second, "second"));
            run(&first, "first").and(other.join().unwrap())
        })?;
        world.finish()
    });
}

#[test]
fn subsets_are_made_of_subsets() {
    worlds(6, |world| {
        let own = world.rank();
        let members = [5, 4, 3, 2];
        if own >= 2 {
            let outer = world.subset(&members)?;
            let inner_members: &[usize] = if own >= 4 { &[1, 0] } else { &[2, 3] };
            let inner = outer.subset(inner_members)?;
            let of_world: Vec<usize> = inner_members.iter().map(|&rank| members[rank]).collect();
            for _ in 0..20 {
                exchange(&inner, own, &of_world, "inner")?;
                exchange(&outer, own, &members, "outer")?;
            }
            // A subset of the world with the same ranks as `inner`.
            let direct = world.subset(&of_world)?;
            exchange(&direct, own, &of_world, "direct")?;
            assert!(outer.subset(&[outer.rank(), 4]).is_err());
        }
        world.finish()
    });
}

#[test]
fn a_rank_lost_in_one_subset_is_lost_to_all() {
    let f = |world: &Rendezvous| -> Result<()> {
        let subset = world.subset(if world.rank() < 2 { &[0, 1] } else { &[2, 3] })?;
        let error = match world.rank() {
            0 => world.barrier(),
            3 => {
                subset.fail("out of memory");
                world.finish()
            }
            // Rank 1 waits for rank 0, which waits for all ranks; rank 2 waits for rank 3.
            _ => subset.barrier(),
        };
        assert_eq!(error.unwrap_err().to_string(), "rank 3 is lost: out of memory");
        Ok(())
    };
    worlds(4, f);
}

#[test]
fn a_rank_that_has_finished_is_missed_only_where_it_is_awaited() {
    // No rank waits for rank 2, which finishes at once.
    worlds(3, |world| {
        if world.rank() < 2 {
            let pair = world.subset(&[0, 1])?;
            (0..50).try_for_each(|_| pair.barrier())?;
        }
        world.finish()
    });
    // Rank 2 finishes at once, rank 0 waits for it in a subset, and rank 1 waits for rank 0. So all
    // three fail, rank 2 too, since it is lost to the others.
    worlds(3, |world| {
        let error = match world.rank() {
            2 => world.finish(),
            1 => world.subset(&[0, 1])?.barrier(),
            _ => world.subset(&[0, 2])?.barrier(),
        };
        let Err(Error::World(WorldError::RankLost { rank, why })) = &error else {
            panic!("{error:?}")
        };
        assert!(*rank == 2 && why.contains("already finished"), "{why}");
        Ok(())
    });
}
