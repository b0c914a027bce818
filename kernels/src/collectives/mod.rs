//! Collectives within the LSA team. Short messages need no separate flags ([`lamport_allreduce`],
//! [`lamport_allreduce_any`], [`lamport_exchange`], [`lamport_exchange_v`],
//! [`lamport_reduce_scatter`], [`lamport_rmsnorm`]); long ones are pushed to the peers, in rounds
//! that end with a barrier ([`push_allreduce`]), between two barriers ([`push_exchange`]) or with a
//! flag for each peer ([`push_exchange_v`]), or loaded from them ([`pull_reduce_scatter`],
//! [`lsa_allreduce`](crate::lsa_allreduce())).

mod elements;
pub mod exchange;
pub mod lamport_allreduce;
pub mod lamport_allreduce_any;
pub mod lamport_exchange;
pub mod lamport_exchange_v;
pub mod lamport_reduce_scatter;
pub mod lamport_rmsnorm;
mod one_step;
pub mod pull_reduce_scatter;
pub mod push_allreduce;
pub mod push_exchange;
pub mod push_exchange_v;
pub mod reduction;
pub mod rmsnorm;
pub mod rmsnorm_block;
mod strip;

/// Threads of each kernel that a multiprocessor of sm_90 has room for, by its registers. A kernel
/// is named without its types. Plans rely on these; a test compares them with `ptxas`'s report.
pub mod room {
    #![expect(missing_docs, reason = "they are the kernels' names")]

    pub const LAMPORT_ALLREDUCE_TWO: u32 = 2048;
    pub const LAMPORT_ALLREDUCE: u32 = 1024;
    pub const LAMPORT_ALLREDUCE_ANY: u32 = 640;
    pub const LAMPORT_EXCHANGE: u32 = 1024;
    pub const LAMPORT_EXCHANGE_V: u32 = 1024;
    pub const LAMPORT_REDUCE_SCATTER: u32 = 1024;
    pub const LAMPORT_RMSNORM: u32 = 1024;
    pub const LSA_ALLREDUCE: u32 = 512;
    pub const PULL_REDUCE_SCATTER: u32 = 1024;
    pub const PUSH_ALLREDUCE: u32 = 1024;
    pub const PUSH_EXCHANGE: u32 = 1024;
    pub const PUSH_EXCHANGE_V: u32 = 1024;

    /// Each kernel's name and number of threads; a name is before any other that is its prefix.
    pub const ALL: [(&str, u32); 12] = [
        ("lamport_allreduce_two", LAMPORT_ALLREDUCE_TWO),
        ("lamport_allreduce_any", LAMPORT_ALLREDUCE_ANY),
        ("lamport_allreduce", LAMPORT_ALLREDUCE),
        ("lamport_exchange_v", LAMPORT_EXCHANGE_V),
        ("lamport_exchange", LAMPORT_EXCHANGE),
        ("lamport_reduce_scatter", LAMPORT_REDUCE_SCATTER),
        ("lamport_rmsnorm", LAMPORT_RMSNORM),
        ("lsa_allreduce", LSA_ALLREDUCE),
        ("pull_reduce_scatter", PULL_REDUCE_SCATTER),
        ("push_allreduce", PUSH_ALLREDUCE),
        ("push_exchange_v", PUSH_EXCHANGE_V),
        ("push_exchange", PUSH_EXCHANGE),
    ];
}
