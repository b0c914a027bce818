//! Collectives within the LSA team. Short messages need no separate flags ([`lamport_allreduce`],
//! [`lamport_allreduce_any`], [`lamport_exchange`], [`lamport_exchange_v`],
//! [`lamport_reduce_scatter`], [`lamport_rmsnorm`]); long ones are pushed to the peers, in rounds
//! that end with a barrier ([`push_allreduce`]), between two barriers ([`push_exchange`]) or with a
//! flag for each peer ([`push_exchange_v`]), or loaded from them ([`pull_reduce_scatter`],
//! [`lsa_allreduce`](crate::lsa_allreduce())).

pub(crate) mod elements;
pub mod exchange;
pub mod lamport_allreduce;
pub mod lamport_allreduce_any;
pub mod lamport_exchange;
pub mod lamport_exchange_v;
pub mod lamport_reduce_scatter;
pub mod lamport_rmsnorm;
mod marks;
mod one_step;
pub mod pull_reduce_scatter;
pub mod push_allreduce;
pub mod push_exchange;
pub mod push_exchange_v;
pub mod reduction;
pub mod rmsnorm;
pub mod rmsnorm_block;
mod strip;

/// The names that many files use.
mod prelude {
    pub(super) use super::elements::Elements;
    pub(super) use super::exchange::{Messages, Parts, Target};
    pub(super) use super::marks::{marked, unmarked, vector_of};
    pub(super) use super::one_step::{OneStep, exchange, is_long, threads, wait_for_previous};
    pub(super) use super::reduction::Reduction;
    pub(super) use super::strip::{self, ROW};
    pub(super) use crate::prelude::*;
}

/// Threads of each kernel that a multiprocessor of sm_90 has room for, by its registers. A kernel
/// is named without its types. Plans rely on these; a test compares them with `ptxas`'s report.
pub mod room {
    #![expect(missing_docs, reason = "they are the kernels' names")]

    macro_rules! rooms {
        ($($kernel:literal: $name:ident $threads:literal;)*) => {
            $( pub const $name: u32 = $threads; )*

            /// Each kernel's name and number of threads.
            pub const ALL: [(&str, u32); 12] = [$(($kernel, $threads)),*];
        };
    }

    // A name is before any other that is its prefix.
    rooms! {
        "lamport_allreduce_two": LAMPORT_ALLREDUCE_TWO 2048;
        "lamport_allreduce_any": LAMPORT_ALLREDUCE_ANY 640;
        "lamport_allreduce": LAMPORT_ALLREDUCE 1024;
        "lamport_exchange_v": LAMPORT_EXCHANGE_V 1024;
        "lamport_exchange": LAMPORT_EXCHANGE 1024;
        "lamport_reduce_scatter": LAMPORT_REDUCE_SCATTER 1024;
        "lamport_rmsnorm": LAMPORT_RMSNORM 1024;
        "lsa_allreduce": LSA_ALLREDUCE 512;
        "pull_reduce_scatter": PULL_REDUCE_SCATTER 1024;
        "push_allreduce": PUSH_ALLREDUCE 1024;
        "push_exchange_v": PUSH_EXCHANGE_V 1024;
        "push_exchange": PUSH_EXCHANGE 1024;
    }
}
