//! Tests of exchanges of the whole world.

use super::super::host_name;
use super::*;
use crate::communicator::peers::{NEVER, Peers};
use crate::error::{Error, WorldError};
use crate::machine::Machine;
use crate::world::run::run_threads;

#[test]
fn sixteen_ranks_meet_and_exchange() {
    let results = together(&configs(16, AMPLE), |config, rendezvous| -> Result<()> {
        let rendezvous = rendezvous?;
        let rank = config.rank;
        assert_eq!((rendezvous.rank(), rendezvous.n_ranks()), (rank, 16));
        assert_eq!(rendezvous.hosts()[7], "host7");
        for round in 0..20 {
            // Lengths differ between ranks, and some are 0.
            let all = rendezvous.all_gather(&vec![round; rank * usize::from(round % 3)])?;
            for (other, part) in all.iter().enumerate() {
                assert_eq!(*part, vec![round; other * usize::from(round % 3)]);
            }
        }
        assert_eq!(rendezvous.broadcast(5, format!("from {rank}").as_bytes())?, b"from 5");
        assert!(rendezvous.broadcast(16, b"").is_err());
        rendezvous.barrier()?;
        rendezvous.finish()
    });
    for result in results {
        result.unwrap();
    }
}

#[test]
fn an_exchange_that_one_rank_cannot_do_fails_on_all_ranks_which_stay_in_step() {
    let results = together(&configs(2, AMPLE), |config, world| {
        let (world, fails) = (world?, config.rank == 1);
        let bytes = vec![0; if fails { 33 << 20 } else { 1 }];
        let too_long = Peers::all_gather(&world, "all".into(), &bytes, NEVER).map(drop);
        let no_root = world.broadcast(if fails { 2 } else { 0 }, &[]).map(drop);
        for (result, why) in
            [(too_long, "at most 33554428 per rank"), (no_root, "rank 2 is not one of 2")]
        {
            let error = result.unwrap_err();
            assert_eq!(matches!(error, Error::InvalidInput { .. }), fails, "{error}");
            let told = matches!(&error, Error::World(WorldError::CallFailed { rank: 1, .. }));
            assert_eq!(told, !fails, "{error}");
            assert!(error.to_string().contains(why), "{error}");
        }
        world.barrier()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn threads_meet_in_memory() {
    let sums = run_threads(&Machine::Gpus, 5, None, |rendezvous| -> Result<usize> {
        let mut sum = 0;
        for _ in 0..50 {
            let all = rendezvous.all_gather(&[rendezvous.rank() as u8])?;
            sum += all.iter().map(|part| usize::from(part[0])).sum::<usize>();
        }
        assert_eq!(rendezvous.hosts(), vec![host_name(); 5]);
        rendezvous.finish()?;
        Ok(sum)
    });
    assert_eq!(sums.unwrap(), [500; 5]);
}

/// Gives up an exchange, as rank `quitter`, before the other ranks come, and then takes part in
/// others.
fn gives_up(world: &Rendezvous, quitter: usize) {
    if world.rank() == quitter {
        let start = Instant::now();
        let cancelled = || match start.elapsed() > Duration::from_millis(50) {
            true => Err(Error::invalid("given up")),
            false => Ok(()),
        };
        let error = Peers::all_gather(world, "given up".into(), &[1], &cancelled).unwrap_err();
        assert_eq!(error.to_string(), Error::invalid("given up").to_string());
    } else {
        thread::sleep(Duration::from_millis(200));
    }
    for round in 0..3 {
        let all = Peers::all_gather(world, "barrier".into(), &[round], NEVER).unwrap();
        assert_eq!(all, [[round]; 3]);
    }
    world.finish().unwrap();
}

#[test]
fn a_rank_that_gives_up_an_exchange_takes_part_in_the_next() {
    for quitter in [0, 1] {
        run_threads(&Machine::Gpus, 3, None, |world| {
            gives_up(world, quitter);
            Ok::<_, Error>(())
        })
        .unwrap();
        together(&configs(3, AMPLE), |_, world| gives_up(&world.unwrap(), quitter));
    }
}
