//! All-reduces, each followed by the addition of a residual and by RMSNorm, in one operation.

use devcomm_kernels::collectives::rmsnorm::QuantisedArgs;
use devcomm_kernels::collectives::{rmsnorm_block, room};

use super::call::Call;
use super::plan::SHORT;
use super::{Algorithm, CollectivePlan, Collectives, CollectivesOptions, INVALID, Workspace};
use crate::CollectiveKind::AllReduce;
use crate::prelude::*;

/// The most bytes of a row that a cluster keeps in registers.
const MAX_ROW: usize = 16 * (MAX_THREADS * MAX_CLUSTER) as usize;

/// The most threads of a block of the kernels.
pub(super) const MAX_THREADS: u32 = 256;

/// The most blocks of a cluster, on every GPU with clusters.
pub(super) const MAX_CLUSTER: u32 = 8;

const OVERLAP: &str = "the buffers of an all-reduce with RMSNorm overlap: each is memory of its \
    own, but the output, which may be the input if it is not quantised";

/// Why RMSNorm has a kernel of its own after the all-reduce.
const TOO_LONG: &str = "as there are too many tokens for one step; RMSNorm follows an all-reduce";

/// How the rows of an all-reduce with RMSNorm are divided.
struct Rows {
    /// The plan of the kernel that does all of it, or `None` where RMSNorm follows an all-reduce.
    plan: Option<CollectivePlan>,
    /// Why it is that plan.
    reason: &'static str,
    tokens: u32,
    /// The bytes of a row.
    row: usize,
    /// The grid that [`grid`] returns; of RMSNorm alone if there is no plan.
    grid: (u32, u32, u32),
}

/// The input, the residual, the weight and the output.
pub(super) type Buffers<T> = [DeviceSlice<T>; 4];

impl Collectives {
    /// Returns the most blocks of `lamport_rmsnorm`: this object's share of every rank's GPU, or
    /// all that are resident. A block receives some rows before it has sent all of them, so that it
    /// may wait for blocks of other ranks that have not begun.
    fn most_blocks(&self, data_type: DataType, cluster: u32, threads: u32) -> u32 {
        if self.workspace.as_ref().is_none_or(|own| own.options.concurrent == 1) {
            return cluster * self.smallest.clusters(data_type, cluster, threads);
        }
        // The share has room for a block on each multiprocessor. In each GPC, room for all blocks
        // of a cluster but one may stay unused: on a small GPU there may be no room for a cluster.
        let unused = self.smallest.gpcs * (cluster - 1);
        self.smallest.multiprocessors.saturating_sub(unused)
    }

    /// Adds the sum of all ranks' `input` to `residual`, and stores to `output` that sum normalised
    /// by RMSNorm: for each token, a row of as many elements as `weight` has, `sum * weight /
    /// sqrt(mean(sum^2) + eps)`. All ranks get the same if their residuals are the same. `output`
    /// may be `input`; nothing else overlaps.
    ///
    /// A row whose sums have a NaN is normalised to NaNs. If the sum of squares is not finite in
    /// f32, as with an infinite sum, the row becomes zeros, and NaN where the sum itself is
    /// infinite. A zero may have either sign.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for buffers of other lengths, of other contexts, not aligned to 16
    /// bytes or which overlap, and for rows that are not a multiple of 16 bytes or have more than
    /// 32 KiB; those of the launch.
    pub fn all_reduce_rmsnorm<T: Element>(
        &self,
        input: &impl Buffer<Element = T>,
        residual: &impl Buffer<Element = T>,
        weight: &impl Buffer<Element = T>,
        output: &impl Buffer<Element = T>,
        eps: f32,
        stream: &Stream,
    ) -> Result<()> {
        let [input, residual] = [input.device_slice(), residual.device_slice()];
        let buffers = [input, residual, weight.device_slice(), output.device_slice()];
        // The output has the input's type.
        self.rmsnorm(&buffers, QuantisedArgs { output: 0, scale: 0 }, eps, stream)
    }

    /// Does the same as [`all_reduce_rmsnorm`](Self::all_reduce_rmsnorm), with a quantised output,
    /// for a product of 8-bit floats: `output` gets the normalised sum divided by the first element
    /// of `scale`, rounded once to the nearest, ties to even, and saturated at 448 of either sign;
    /// a NaN stays a NaN. The kernel reads the scale. It is the scale of vLLM's static quantisation
    /// per tensor, and of [`Product::scales`](crate::Product::scales).
    ///
    /// `input` may be overwritten: where RMSNorm follows an all-reduce, it gets the sum. No buffers
    /// overlap. Errors are those of [`all_reduce_rmsnorm`](Self::all_reduce_rmsnorm), and for a
    /// `scale` without an element.
    pub fn all_reduce_rmsnorm_quantised<T: Element>(
        &self,
        input: &impl Buffer<Element = T>,
        residual: &impl Buffer<Element = T>,
        weight: &impl Buffer<Element = T>,
        (output, scale): (&impl Buffer<Element = F8E4M3>, &impl Buffer<Element = f32>),
        eps: f32,
        stream: &Stream,
    ) -> Result<()> {
        // Where RMSNorm follows an all-reduce, the sums overwrite the input.
        let [input, residual] = [input.device_slice(), residual.device_slice()];
        let buffers = [input.clone(), residual, weight.device_slice(), input];
        let (output, scale) = (output.device_slice(), scale.device_slice());
        let own = self.communicator.context();
        let output_at = aligned(own, "the output", &output, 1, buffers[0].len())?;
        let scale_at = address(own, "the scale", &scale, 1, 1)?;
        // RMSNorm reads the scale after the sums have overwritten the input.
        let overlap = |slice: &DeviceSlice<T>| slice.overlaps(&output) || slice.overlaps(&scale);
        refuse_if!(buffers.iter().any(overlap) || scale.overlaps(&output), "{OVERLAP}");
        let quantised = QuantisedArgs { output: output_at, scale: scale_at };
        self.rmsnorm(&buffers, quantised, eps, stream)
    }

    /// Returns how it is done. If RMSNorm follows an all-reduce, the plan is the all-reduce's.
    pub(super) fn explain_rmsnorm<T: Element>(&self, buffers: &Buffers<T>) -> Result<Explanation> {
        let Rows { plan, reason, .. } = self.rows(buffers)?;
        if let Some(plan) = plan {
            return Ok(Explanation { plan, reason });
        }
        let reduce = Call::reduce(self, AllReduce, [&buffers[0], &buffers[3]], &ReduceOp::Sum)?;
        Ok(Explanation { plan: self.decide(&reduce.request()).plan, reason })
    }

    /// Checks the buffers, and returns how the rows are divided.
    fn rows<T: Element>(&self, buffers: &Buffers<T>) -> Result<Rows> {
        let [input, residual, weight, output] = buffers;
        let data_type = T::DATA_TYPE;
        let (count, hidden) = (input.len(), weight.len());
        let check = |name, slice, len| aligned(self.communicator.context(), name, slice, 1, len);
        check("the input", input, count)?;
        check("the residual", residual, count)?;
        check("the weight", weight, hidden)?;
        check("the output", output, count)?;
        let overlap = [input, weight, output].iter().any(|other| residual.overlaps(other))
            || [input, output].iter().any(|other| weight.overlaps(other))
            || !input.is_apart_or_at(output, Some(0));
        refuse_if!(overlap, "{OVERLAP}");
        let row = hidden * data_type.size();
        let is_whole = row > 0 && row.is_multiple_of(16) && count.is_multiple_of(hidden);
        refuse_if!(
            !is_whole || row > MAX_ROW,
            "{count} elements in rows of {hidden}: rows have whole vectors of 16 bytes, and at \
             most {MAX_ROW} bytes"
        );
        refuse_if!(
            !matches!(data_type, DataType::Float32 | DataType::Float16 | DataType::Bfloat16),
            "RMSNorm of {data_type:?}"
        );
        // Kernels number the vectors of 16 bytes by 32 bits.
        let vectors = u32::try_from(count * data_type.size() / 16);
        refuse_if!(
            vectors.is_err(),
            "RMSNorm of {count} elements: 2^32 vectors of 16 bytes or more"
        );
        let tokens = (count / hidden) as u32;
        let ranks = self.communicator.n_ranks();
        let rmsnorm_alone = |reason| {
            let grid = grid(row, tokens, MAX_THREADS, |cluster, _| cluster * tokens);
            Ok(Rows { plan: None, reason, tokens, row, grid })
        };
        if count == 0 {
            return rmsnorm_alone(INVALID);
        }
        let Some(workspace) = &self.workspace else {
            return rmsnorm_alone(self.unreached());
        };
        if count * data_type.size() > 16 * workspace.options.all_reduce_slots(ranks) {
            return rmsnorm_alone(TOO_LONG);
        }
        let most = |cluster, threads| self.most_blocks(data_type, cluster, threads);
        let most_threads = workspace.threads(room::LAMPORT_RMSNORM).min(MAX_THREADS);
        let grid @ (cluster, threads, blocks) = grid(row, tokens, most_threads, most);
        // Two ranks' clusters may have several rows each. Without room there are 0 blocks.
        if !(ranks == 2 && blocks > 0 || blocks == cluster * tokens) {
            return rmsnorm_alone(TOO_LONG);
        }
        let plan = Some(CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads });
        Ok(Rows { plan, reason: SHORT, tokens, row, grid })
    }

    /// Enqueues the operation, quantised or not. Where RMSNorm follows an all-reduce, the output
    /// also gets the all-reduce's sums.
    fn rmsnorm<T: Element>(
        &self,
        buffers: &Buffers<T>,
        quantised: QuantisedArgs<u64, u64>,
        eps: f32,
        stream: &Stream,
    ) -> Result<()> {
        let (count, hidden) = (buffers[0].len(), buffers[2].len());
        let Rows { plan, tokens, row, grid: (cluster, threads, blocks), .. } =
            self.rows(buffers)?;
        require_context("the stream", stream.context(), self.communicator.context())?;
        if count == 0 {
            return Ok(());
        }
        let options = self.workspace.as_ref().map_or(CollectivesOptions::new(), |own| own.options);
        let shape = CollectivePlan { algorithm: Algorithm::Lamport, blocks, threads };
        let config = options.config(shape).with_cluster(cluster);
        let [input, residual, weight, to] = buffers.each_ref().map(DeviceSlice::device_address);
        let (hidden, target) = (hidden as u32, self.compiled.on(stream));
        if let (Some(plan), Some(Workspace { dev_comm, memory, .. })) = (plan, &self.workspace) {
            let what = || format!("all_reduce_rmsnorm of {count} {}, rows of {hidden}", T::NAME);
            self.compare(plan, what)?;
            let _turn = self.order.begin(stream)?;
            let args =
                (dev_comm, memory, input, residual, weight, to, quantised, tokens, hidden, eps);
            // SAFETY: `rows` has checked that the buffers have the elements, aligned;
            // dropping one waits for the stream. `_turn` orders launches with the workspace.
            return with_element!(T::DATA_TYPE, Float in f32, f16, bf16 => unsafe {
                kernels::lamport_rmsnorm::<Float>::launch(args, config, &target)
            });
        }
        self.all_reduce(&buffers[0], &buffers[3], ReduceOp::Sum, stream)?;
        // SAFETY: `rows` has checked that the buffers have the elements, aligned;
        // dropping one waits for the stream.
        with_element!(T::DATA_TYPE, Float in f32, f16, bf16 => unsafe {
            if self.is_older {
                let args = (to, residual, weight, to, quantised, hidden, eps);
                let threads = (row as u32).div_ceil(16 * rmsnorm_block::VECTORS as u32);
                let config = LaunchConfig::new(tokens, threads.next_multiple_of(32));
                return kernels::rmsnorm_block::<Float>::launch(args, config, &target);
            }
            let args = (to, residual, weight, to, quantised, tokens, hidden, eps);
            // A dependent launch of any number of blocks would take the room of other objects'
            // operations while it waits.
            let config = match options.concurrent {
                1 => config,
                _ => options.independent(shape).with_cluster(cluster),
            };
            kernels::rmsnorm::<Float>::launch(args, config, &target)
        })
    }
}

/// Returns the blocks of a cluster, the threads of a block, and the blocks of the grid for `tokens`
/// rows of `row` bytes; a thread has a vector of a row. `most` returns the most blocks of the grid
/// for the blocks of a cluster and the threads of a block. There are 0 blocks without room for one
/// cluster.
///
/// A row takes the less time the more blocks it has, of at least 128 threads. Clusters that have
/// several rows are small, as their blocks wait for each other.
pub(super) fn grid(
    row: usize,
    tokens: u32,
    most_threads: u32,
    most: impl Fn(u32, u32) -> u32,
) -> (u32, u32, u32) {
    let vectors = (row / 16) as u32;
    let mut cluster = 1 << (vectors / 128).clamp(1, MAX_CLUSTER).ilog2();
    if vectors.div_ceil(cluster) > most_threads {
        cluster = MAX_CLUSTER.min(2 * cluster);
    }
    loop {
        let threads = vectors.div_ceil(cluster).next_multiple_of(32);
        let clusters = if threads > most_threads { 0 } else { most(cluster, threads) / cluster };
        let is_smallest = cluster == 1 || vectors.div_ceil(cluster / 2) > most_threads;
        if tokens <= clusters || is_smallest {
            return (cluster, threads, cluster * tokens.min(clusters));
        }
        cluster /= 2;
    }
}
