//! Compares kernel-initiated with host-initiated communication: kernels that communicate themselves
//! against NCCL's host calls, which launch NCCL's kernels.
//!
//! Every variant uses the same random data and is checked before it is timed: all elements of its
//! result, or some of a large one. Every round times one batch of each, in random order. The column
//! `time/best` has medians of ratios within a round; the ratios of `report` are those of medians.

mod all_reduce;
mod barrier;
mod benchmark;
mod collectives;
mod concurrent_product;
mod expert_parallel;
mod fusion;
mod gemm;
mod gemm_allreduce;
mod gemm_ladder;
mod grouped_gemm;
mod job;
mod launch;
mod operation;
mod p2p;
mod prelude;
mod product;
mod put;
mod rmsnorm_allreduce;
mod shapes;
mod shared_rows;
mod signal;
mod tune;
mod tune_collectives;
mod tune_table;
mod twins;
mod workloads;

pub use all_reduce::AllReduce;
pub use barrier::Barrier;
pub use benchmark::{Command, run};
pub use collectives::{AllGather, AllToAll, AllToAllV, Broadcast, ReduceScatter};
pub use expert_parallel::Experts;
pub use gemm::Gemm;
pub use gemm_allreduce::GemmAllReduce;
pub use gemm_ladder::GemmLadder;
pub use grouped_gemm::GroupedGemm;
pub use launch::Launch;
pub use operation::Operation;
pub use p2p::P2p;
pub use put::Put;
pub use rmsnorm_allreduce::RmsNormAllReduce;
pub use shared_rows::{AllGatherGemm, GemmReduceScatter};
pub use signal::Signal;
pub use tune::Tune;
pub use tune_collectives::TuneCollective;
pub use twins::Twins;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::benchmark::Benchmark;
    use crate::contenders::{Contest, Role, Variant};

    /// Checks the roles of a benchmark's variants, and that each variant has one.
    fn has_roles<B: Benchmark>() {
        let contest = Contest::of(B::NAME).unwrap();
        let with = [Role::Ours, Role::Theirs, Role::Column].map(|role| contest.with(role));
        assert!(with[0].len() <= 1 && !with[1].is_empty(), "{}", B::NAME);
        let mut roles: Vec<&str> = with.concat().into_iter().map(Variant::name).collect();
        let mut all: Vec<&str> = contest.variants.iter().map(|info| info.variant.name()).collect();
        roles.sort_unstable();
        all.sort_unstable();
        all.dedup();
        assert_eq!(roles, all, "{}", B::NAME);
    }

    macro_rules! have_roles {
        ($($benchmark:ident)*) => { $(has_roles::<$benchmark>();)* };
    }

    #[test]
    fn every_variant_is_the_default_or_a_competitor_or_only_a_column() {
        have_roles! {
            AllReduce AllGather ReduceScatter Broadcast AllToAll AllToAllV RmsNormAllReduce Experts
            Launch Barrier Put Signal P2p Gemm GroupedGemm
            GemmAllReduce GemmReduceScatter AllGatherGemm GemmLadder Twins
        }
    }
}
