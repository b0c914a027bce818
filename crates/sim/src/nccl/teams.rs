//! Teams, and the device communicator's fields: arithmetic that `devcomm_types` has.

use devcomm_types::nccl::{DevComm, Team};

pub(super) unsafe extern "C-unwind" fn rank_is_member(
    a: *const Team,
    b: *const Team,
    b_peer: i32,
) -> bool {
    // SAFETY: the kernel passes teams.
    unsafe { (*a).contains(*b, b_peer) }
}

pub(super) unsafe extern "C-unwind" fn rank_to_team(
    a: *const Team,
    b: *const Team,
    b_peer: i32,
) -> i32 {
    // SAFETY: the kernel passes teams.
    unsafe { (*a).rank_in(*b, b_peer) }
}

pub(super) unsafe extern "C-unwind" fn rank_to_world(
    comm: *const DevComm,
    team: *const Team,
    rank: i32,
) -> i32 {
    // SAFETY: the kernel passes a device communicator and a team.
    unsafe { (*team).to_world((*comm).rank, rank) }
}

pub(super) unsafe extern "C-unwind" fn rank_to_lsa(
    comm: *const DevComm,
    team: *const Team,
    rank: i32,
) -> i32 {
    // SAFETY: the kernel passes a device communicator and a team.
    unsafe { (*team).to_lsa((*comm).lsa_rank, rank) }
}

pub(super) unsafe extern "C-unwind" fn rank_in_difference(
    parent: *const Team,
    subset: *const Team,
    index: i32,
) -> i32 {
    // SAFETY: the kernel passes teams.
    unsafe { (*parent).rank_in_difference(*subset, index) }
}

macro_rules! fields {
    ($( $name:ident = $field:ident; )*) => { $(
        pub(super) unsafe extern "C-unwind" fn $name(comm: *const DevComm) -> i32 {
            // SAFETY: the kernel passes a device communicator.
            unsafe { (*comm).$field }
        }
    )* };
}

fields! {
    comm_rank = rank;
    comm_n_ranks = n_ranks;
    comm_lsa_rank = lsa_rank;
    comm_lsa_size = lsa_size;
}
