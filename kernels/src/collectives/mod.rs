//! Collectives within the LSA team. Short messages are their own flags ([`lamport_allreduce`],
//! [`lamport_rmsnorm`]); long ones are pushed to the peers in chunks, each with a flag
//! ([`push_allreduce`]).

mod elements;
pub mod lamport_allreduce;
pub mod lamport_rmsnorm;
pub mod push_allreduce;
pub mod reduction;
pub mod rmsnorm;
