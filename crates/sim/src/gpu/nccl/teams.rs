//! NCCL's functions for team arithmetic and for the device communicator's fields.

use devcomm_types::nccl::{DevComm, Team};

/// Declares functions that return an expression.
macro_rules! arithmetic {
    ($( fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $expression:expr; )*) => { $(
        pub(super) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the kernel passes teams, and a device communicator.
            unsafe { $expression }
        }
    )* };
}

arithmetic! {
    fn rank_is_member(a: *const Team, b: *const Team, b_peer: i32) -> bool
        = (*a).contains(*b, b_peer);
    fn rank_to_team(a: *const Team, b: *const Team, b_peer: i32) -> i32
        = (*a).rank_in(*b, b_peer);
    fn rank_to_world(comm: *const DevComm, team: *const Team, rank: i32) -> i32
        = (*team).to_world((*comm).rank, rank);
    fn rank_to_lsa(comm: *const DevComm, team: *const Team, rank: i32) -> i32
        = (*team).to_lsa((*comm).lsa_rank, rank);
    fn rank_in_difference(parent: *const Team, subset: *const Team, index: i32) -> i32
        = (*parent).rank_in_difference(*subset, index);
    fn comm_rank(comm: *const DevComm) -> i32 = (*comm).rank;
    fn comm_n_ranks(comm: *const DevComm) -> i32 = (*comm).n_ranks;
    fn comm_lsa_rank(comm: *const DevComm) -> i32 = (*comm).lsa_rank;
    fn comm_lsa_size(comm: *const DevComm) -> i32 = (*comm).lsa_size;
}
