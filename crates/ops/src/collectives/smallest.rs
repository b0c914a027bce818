//! What a plan depends on of the ranks' GPUs: the least that any of them has. With numbers of its
//! own GPU only, a rank could launch another kernel or another grid than its peers.

use std::collections::HashMap;

use super::rmsnorm::{MAX_CLUSTER, MAX_THREADS};
use crate::prelude::*;

/// The least of what the ranks' GPUs have.
pub(super) struct SmallestGpu {
    pub(super) multiprocessors: u32,
    /// The most threads on a multiprocessor.
    pub(super) threads: u32,
    /// The most graphics processing clusters (GPCs) of any GPU: each leaves multiprocessors unused
    /// that are too few for a cluster of blocks.
    pub(super) gpcs: u32,
    /// How many clusters of `lamport_rmsnorm` are resident, for a type, the blocks of a cluster and
    /// the threads of a block. Only if operations may fill the GPU.
    clusters: HashMap<(DataType, u32, u32), u32>,
}

impl SmallestGpu {
    /// Returns the multiprocessors, threads and GPCs of a context's GPU, for [`of`](Self::of).
    pub(super) fn numbers(context: &Context) -> [u64; 3] {
        let limits = context.limits();
        // GPUs of compute capability 12 have up to 12 GPCs, and others 8.
        let gpcs = if limits.compute_capability.0 >= 12 { 12 } else { 8 };
        [limits.multiprocessors, limits.max_threads_per_multiprocessor, gpcs].map(u64::from)
    }

    /// Returns the fewest multiprocessors and threads, and the most GPCs, of the ranks'
    /// [`numbers`](Self::numbers).
    pub(super) fn of(all: impl Iterator<Item = [u64; 3]>) -> Self {
        let least = |[a, b, c]: [u64; 3], [d, e, f]: [u64; 3]| [a.min(d), b.min(e), c.max(f)];
        let all = all.reduce(least).unwrap_or_default();
        let [multiprocessors, threads, gpcs] = all.map(|number| number as u32);
        Self { multiprocessors, threads, gpcs, clusters: HashMap::new() }
    }

    /// Agrees on how many clusters of `lamport_rmsnorm` are resident on every rank's GPU: they may
    /// differ between GPUs of one kind, whose GPCs have different numbers of multiprocessors.
    /// *Collective*.
    pub(super) fn agree_on_clusters(
        &mut self,
        comm: &Communicator,
        compiled: &Kernels,
    ) -> Result<()> {
        let shapes = [DataType::Float32, DataType::Float16, DataType::Bfloat16]
            .into_iter()
            .flat_map(|float| {
                let clusters = (0..=MAX_CLUSTER.ilog2()).map(|log| 1 << log);
                clusters.flat_map(move |cluster| {
                    (32..=MAX_THREADS).step_by(32).map(move |threads| (float, cluster, threads))
                })
            });
        let resident = |(data_type, cluster, threads): (DataType, u32, u32)| {
            let dynamic_shared = 0;
            with_element!(data_type, Float in f32, f16, bf16 => {
                type Kernel = kernels::lamport_rmsnorm<Float>;
                compiled.resident_clusters::<Kernel>(cluster, threads, dynamic_shared)
            })
        };
        let own = shapes.clone().map(resident).collect::<Result<Vec<_>>>();
        let call = comm.collective("Collectives::new: the clusters that are resident");
        let (_, all) = call.exchange(own.map(|own| ((), own)))?;
        let least = (0..all[0].len()).map(|i| all.iter().map(|own| own[i]).min().unwrap_or(0));
        self.clusters = shapes.zip(least).collect();
        Ok(())
    }

    /// Returns how many clusters of `lamport_rmsnorm` are resident on every rank's GPU.
    pub(super) fn clusters(&self, data_type: DataType, cluster: u32, threads: u32) -> u32 {
        self.clusters.get(&(data_type, cluster, threads)).copied().unwrap_or(0)
    }
}
