//! Tests of what NCCL answers about windows that no simulated machine has.

use devcomm_host::{Error, LogicalEndpoint, Team, World};

use crate::support::tests;

tests! {
    logical_endpoints_are_those_of_nccl in ["WORLD_SIZE" = "1", "RANK" = "0"],
}

fn logical_endpoints_are_those_of_nccl() {
    let ran: Result<Vec<()>, Error> = World::from_env().unwrap().run(|rank| {
        let window = rank.communicator()?.window::<f32>(8)?;
        // The stub's numbers are made of the calls' arguments.
        let at = |id, element: usize| LogicalEndpoint { id, offset: 4 * element };
        assert_eq!(window.peer_endpoint(0, 3)?, at(100, 3));
        assert_eq!(window.multimem_endpoint(7)?, at(7, 7));
        let team = Team { n_ranks: 1, rank: 0, stride: 1 };
        assert_eq!(window.cft_endpoint(team, 0, 5)?, at(1010, 5));
        Ok(())
    });
    ran.unwrap();
}
