//! Tests that NCCL does each operation where no kernel communicates: on GPUs before Hopper, and
//! with numbers of ranks other than 2, 4 and 8.

use devcomm::kernels::collectives::rmsnorm::QuantisedArgs;
use devcomm::{
    Buffer, Collective, Collectives, CollectivesOptions, Context, DeviceSlice, Element, F8E4M3,
    KERNELS, Kernel, LaunchConfig, Parts, Rank, ReduceOp, Result, Simulation, Stream, kernels,
};
use devcomm_testing::machines::Gpus;
use half::{bf16, f16};

use super::{BF16_ERROR, F16_ERROR, F32_ERROR, Number, normalises, reduced, sent};

const OLDER: &str = "nccl, as a rank's GPU is older than Hopper";
const UNREACHED: &str =
    "nccl, as there are not 2, 4 or 8 ranks that reach each other by load and store";

/// Elements for each rank.
const N: usize = 37;

/// Collectives, and the reason for which NCCL does all of their operations.
struct Operations<'a> {
    rank: &'a Rank,
    collectives: Collectives,
    stream: Stream,
    reason: &'static str,
}

impl Operations<'_> {
    /// Returns memory with this rank's elements, in a window or not.
    fn sending<T: Number>(&self, count: usize, in_window: bool) -> Result<DeviceSlice<T>> {
        let memory = self.receiving(count, in_window)?;
        let own = (0..count).map(|i| T::of(sent(self.rank.rank(), 0, i)));
        memory.copy_from_host(&own.collect::<Vec<_>>())?;
        Ok(memory)
    }

    fn receiving<T: Element>(&self, count: usize, in_window: bool) -> Result<DeviceSlice<T>> {
        let comm = self.rank.communicator()?;
        Ok(match in_window {
            true => comm.window(count)?.device_slice(),
            false => comm.mem_alloc(count)?.device_slice(),
        })
    }

    /// Explains and does an operation, and checks that element `i` of `recv` is `want(i)`.
    fn check<T: Number>(
        &self,
        call: Collective<'_>,
        operation: impl Fn(&Collectives) -> Result<()>,
        recv: &DeviceSlice<T>,
        want: impl Fn(usize) -> f32,
    ) -> Result<()> {
        assert_eq!(self.collectives.explain(&call)?.to_string(), self.reason);
        operation(&self.collectives)?;
        self.stream.synchronize()?;
        let mut got = vec![T::of(0); recv.len()];
        recv.copy_to_host(&mut got)?;
        for (i, got) in got.into_iter().enumerate() {
            let (got, want) = (got.value(), want(i));
            // NCCL multiplies by the reciprocal of the number of ranks, rounded, to average numbers
            // of at most 8.
            assert!((got - want).abs() <= 8.0 * f32::EPSILON, "element {i}: {got}, not {want}");
        }
        Ok(())
    }

    fn reductions<T: Number>(&self, op: ReduceOp, in_window: bool) -> Result<()> {
        let (rank, ranks, stream) = (self.rank.rank(), self.rank.n_ranks(), &self.stream);
        let all = |i| reduced(op, (0..ranks).map(|rank| sent(rank, 0, i)));
        let send = self.sending::<T>(N * ranks, in_window)?;
        let recv = self.receiving::<T>(N, in_window)?;
        let scatter = |c: &Collectives| c.reduce_scatter(&send, &recv, op, stream);
        self.check(Collective::reduce_scatter(&send, &recv, op), scatter, &recv, |i| {
            all(rank * N + i)
        })?;
        let call = Collective::all_reduce(&send, &send, op);
        self.check(call, |c| c.all_reduce(&send, &send, op, stream), &send, all)
    }

    fn exchanges<T: Number>(&self, in_window: bool) -> Result<()> {
        let (rank, ranks, stream) = (self.rank.rank(), self.rank.n_ranks(), &self.stream);
        let element = |rank, i| sent(rank, 0, i) as f32;
        let send = self.sending::<T>(N * ranks, in_window)?;
        let recv = self.receiving::<T>(N * ranks, in_window)?;
        let (chunk, root) = (send.slice(..N)?, ranks - 1);
        let gather = |c: &Collectives| c.all_gather(&chunk, &recv, stream);
        let call = Collective::all_gather(&chunk, &recv);
        self.check(call, gather, &recv, |i| element(i / N, i % N))?;
        let broadcast = |c: &Collectives| c.broadcast(Some(send.clone()), &recv, root, stream);
        let call = Collective::broadcast(Some(send.clone()), &recv, root);
        self.check(call, broadcast, &recv, |i| element(root, i))?;
        let mine = |i| element(i / N, rank * N + i % N);
        let call = Collective::all_to_all(&send, &recv);
        self.check(call, |c| c.all_to_all(&send, &recv, stream), &recv, mine)?;
        // Rank `r` gets `r` elements fewer from each rank, and the rest of its memory is unchanged.
        let counts: Vec<_> = (0..ranks).map(|to| N - to).collect();
        let offsets: Vec<_> = (0..ranks).map(|peer| peer * N).collect();
        let from_each = vec![N - rank; ranks];
        let parts = Parts { counts: &counts, offsets: &offsets };
        let received = Parts { counts: &from_each, offsets: &offsets };
        stream.fill(&recv, T::of(100))?;
        let exchange = |c: &Collectives| c.all_to_all_v(&send, parts, &recv, received, stream);
        let call = Collective::all_to_all_v(&send, parts, &recv, received);
        self.check(call, exchange, &recv, |i| if i % N < N - rank { mine(i) } else { 100.0 })
    }

    /// Rows whose input and residual are 0 become 0.
    fn explains_rmsnorm(&self) -> Result<()> {
        let (stream, in_window) = (&self.stream, false);
        let [x, residual] = [self.receiving::<f32>(8, in_window)?, self.receiving(8, in_window)?];
        let weight = self.receiving::<f32>(4, in_window)?;
        let scale = self.receiving(1, in_window)?;
        let output = self.receiving::<F8E4M3>(8, in_window)?;
        [&x, &residual, &weight].into_iter().try_for_each(|slice| stream.fill(slice, 0.0))?;
        stream.fill(&scale, 1.0)?;
        let plain = |c: &Collectives| c.all_reduce_rmsnorm(&x, &residual, &weight, &x, 0.5, stream);
        let call = Collective::all_reduce_rmsnorm(&x, &residual, &weight, &x);
        self.check(call, plain, &x, |_| 0.0)?;
        let quantised = |c: &Collectives| {
            let to = (&output, &scale);
            c.all_reduce_rmsnorm_quantised(&x, &residual, &weight, to, 0.5, stream)
        };
        let call = Collective::all_reduce_rmsnorm(&x, &residual, &weight, &x);
        self.check(call, quantised, &output, |_| 0.0)
    }
}

fn is_older(context: &Context) -> bool {
    context.limits().compute_capability < (9, 0)
}

/// Checks that NCCL does all operations.
fn all_operations(rank: &Rank) -> Result<()> {
    let is_older = is_older(rank.context());
    // GPUs of this system may be Hopper's, on which kernels communicate.
    if !is_older && matches!(rank.n_ranks(), 2 | 4 | 8) {
        return Ok(());
    }
    let reason = if is_older { OLDER } else { UNREACHED };
    let collectives = Collectives::new(rank.communicator()?)?;
    let operations = Operations { rank, collectives, stream: rank.stream()?, reason };
    for in_window in [false, true] {
        operations.reductions::<f32>(ReduceOp::Sum, in_window)?;
        operations.reductions::<bf16>(ReduceOp::Max, in_window)?;
        operations.reductions::<f32>(ReduceOp::Avg, in_window)?;
        operations.exchanges::<f16>(in_window)?;
    }
    operations.explains_rmsnorm()?;
    normalises::<f32>(rank, 3, 64, F32_ERROR, None)?;
    normalises::<f16>(rank, 2, 264, F16_ERROR, None)?;
    normalises::<bf16>(rank, 2, 2056, BF16_ERROR, None)?;
    normalises::<f32>(rank, 1, 20, F32_ERROR, Some(0.01))?;
    normalises::<f16>(rank, 3, 72, F32_ERROR, Some(37.0))?;
    normalises::<bf16>(rank, 2, 264, F32_ERROR, Some(0.01))
}

#[test]
fn gpus_before_hopper_do_all_operations_by_nccl() {
    let name = "gpus_before_hopper_do_all_operations_by_nccl";
    for (ranks, (major, minor)) in [(1, (8, 0)), (2, (8, 0)), (4, (8, 9)), (3, (8, 6))] {
        let simulation = Simulation::new(ranks).compute_capability(major, minor);
        Gpus::from(simulation).run(name, all_operations);
    }
}

#[test]
fn other_numbers_of_ranks_do_all_operations_by_nccl() {
    for ranks in [3, 5, 6, 7] {
        let gpus = Gpus::from(Simulation::new(ranks));
        gpus.run("other_numbers_of_ranks_do_all_operations_by_nccl", all_operations);
    }
}

#[test]
fn blocks_of_several_objects_fit_multiprocessors_with_room_for_1536_threads() {
    let gpus = Gpus::from(Simulation::new(2).compute_capability(12, 0));
    gpus.run("blocks_of_several_objects_fit_multiprocessors_with_room_for_1536_threads", |rank| {
        let comm = rank.communicator()?;
        let x = comm.window::<f32>(1 << 18)?;
        let call = Collective::all_reduce(&x, &x, ReduceOp::Sum);
        let room = comm.context().limits().max_threads_per_multiprocessor;
        assert!(room == 1536 || !rank.is_simulated());
        for objects in 2..=4 {
            let collectives = CollectivesOptions::new().concurrent(objects).build(comm)?;
            for plan in collectives.plans(&call)? {
                // Each object may have a launch that runs, and one that waits.
                assert!(2 * objects * plan.threads <= room, "{objects} objects, {plan}");
            }
        }
        Ok(())
    });
}

#[test]
fn gpus_before_hopper_normalise_the_longest_rows() {
    let gpus = Gpus::from(Simulation::new(2).compute_capability(8, 0));
    gpus.run("gpus_before_hopper_normalise_the_longest_rows", |rank| {
        normalises::<bf16>(rank, 1, 16_384, BF16_ERROR, None)?;
        normalises::<f32>(rank, 2, 4100, F32_ERROR, Some(0.01))
    });
}

#[test]
fn gpus_before_hopper_refuse_clusters_and_dependent_launches() {
    type Rows = kernels::rmsnorm_block<f32>;
    let gpus = Gpus::from(Simulation::new(1).compute_capability(8, 9));
    gpus.run("gpus_before_hopper_refuse_clusters_and_dependent_launches", |rank| {
        if !is_older(rank.context()) {
            return Ok(());
        }
        rank.load(&KERNELS.only(&[Rows::FILE]))?;
        let stream = rank.stream()?;
        let rows = rank.communicator()?.mem_alloc::<f32>(12)?;
        let at = |first: usize| rows.slice(first..first + 4).map(|row| row.device_address());
        let (x, residual, weight) = (at(0)?, at(4)?, at(8)?);
        let config = LaunchConfig::new(1, 32);
        for (config, what) in [
            (config.with_cluster(1), "a launch with clusters"),
            (config.with_dependent(), "a dependent launch"),
        ] {
            let quantised = QuantisedArgs { output: 0_u64, scale: 0_u64 };
            let launch = Rows::args(x, residual, weight, x, quantised, 4, 1.0);
            // SAFETY: `rows` keeps the memory of the aligned rows, and the launch is refused.
            let refused = unsafe { launch.config(config).launch(&stream) };
            let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
            let why = format!("{what} needs a GPU of compute capability 9.0, but this one's is");
            assert!(message.contains(&why), "{message}");
        }
        Ok(())
    });
}
