//! Collectives within the LSA team. Short messages are their own flags ([`lamport_allreduce`],
//! [`lamport_allreduce_any`], [`lamport_exchange`], [`lamport_exchange_v`],
//! [`lamport_reduce_scatter`], [`lamport_rmsnorm`]); long ones are pushed to the peers, in rounds
//! that end with a barrier ([`push_allreduce`]), between two barriers ([`push_exchange`]) or with a
//! flag for each peer ([`push_exchange_v`]), or loaded from them ([`pull_reduce_scatter`]).

mod elements;
pub mod exchange;
pub mod lamport_allreduce;
pub mod lamport_allreduce_any;
pub mod lamport_exchange;
pub mod lamport_exchange_v;
pub mod lamport_reduce_scatter;
pub mod lamport_rmsnorm;
pub mod pull_reduce_scatter;
pub mod push_allreduce;
pub mod push_exchange;
pub mod push_exchange_v;
pub mod reduction;
pub mod rmsnorm;
