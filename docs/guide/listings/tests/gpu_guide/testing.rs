//! The tests of the chapter on testing.

// ANCHOR: tests
use devcomm::{Check, Error, Rank, Simulation};

// On GPUs if there are four and the program has PTX, or else simulated: in fixed, random and
// unfair orders.
#[devcomm::test(ranks = 4)]
fn every_rank_meets_the_others(rank: &Rank) -> Result<(), Error> {
    rank.barrier()
}

#[test]
fn the_ranks_of_two_teams_meet() {
    let machine = Simulation::new(4).team_size(2);
    Check::new(machine).random(10).pct(10, 3).lagging(4).run(|rank| rank.barrier());
}

// Every order of a small protocol, at most 1000.
#[test]
fn two_ranks_meet_in_every_order() {
    devcomm::check_exhaustive(2, 1000, |rank| rank.barrier());
}
// ANCHOR_END: tests
