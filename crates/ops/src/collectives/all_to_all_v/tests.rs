//! Tests of all-to-all with a length for each pair of ranks.

use devcomm_host::{Rank, Simulation, World};

use super::*;
use crate::{Collective, CollectivesOptions};

#[test]
fn a_long_part_for_the_rank_itself_is_no_long_message() {
    let run = |rank: &Rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = CollectivesOptions::new().lamport_bytes(1024).build(comm)?;
        let (send, recv) = (comm.mem_alloc::<f32>(4000)?, comm.mem_alloc::<f32>(4000)?);
        let how = |own: usize, other: usize| {
            let mut counts = [other; 2];
            counts[rank.rank()] = own;
            let parts = Parts { counts: &counts, offsets: &[0, 2000] };
            let call = Collective::all_to_all_v(&send, parts, &recv, parts);
            collectives.all_to_all_v(&send, parts, &recv, parts, &stream)?;
            collectives.explain(&call).map(|how| how.plan.algorithm)
        };
        assert_eq!(how(2000, 3)?, Algorithm::Lamport);
        assert_eq!(how(3, 2000)?, Algorithm::Nccl);
        stream.synchronize()
    };
    World::simulated(2).unwrap().run(run).unwrap();
}

#[test]
fn in_an_unchecked_world_wrong_counts_cut_a_message_or_wait_for_ever() {
    let exchange = |sent: usize, received: usize| {
        let run = |rank: &Rank| {
            let (comm, stream) = (rank.communicator()?, rank.stream()?);
            let collectives = CollectivesOptions::new().lamport_bytes(8192).build(comm)?;
            let (send, recv) = (comm.mem_alloc::<f32>(1000)?, comm.mem_alloc::<f32>(1000)?);
            let [to, from] = match rank.rank() {
                0 => [[0, sent], [0; 2]],
                _ => [[0; 2], [received, 0]],
            };
            let [to, from] = [&to, &from].map(|counts| Parts { counts, offsets: &[0; 2] });
            collectives.all_to_all_v(&send, to, &recv, from, &stream)?;
            stream.synchronize()
        };
        let world = World::builder().checked(false).simulate(Simulation::new(2));
        world.from_env().unwrap().run(run).map_err(|error| error.to_string())
    };
    exchange(1000, 10).unwrap();
    let error = exchange(10, 1000).unwrap_err();
    assert!(error.contains("of a Lamport session"), "{error}");
}
