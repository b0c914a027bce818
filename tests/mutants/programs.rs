//! Short programs that run the kernels under test, with nothing between two launches that would
//! hide a missing barrier of theirs: the host waits only at the end.

mod guide;
mod products;

use devcomm::sim::Simulation;
use devcomm::{
    Algorithm, Buffer, Collective, CollectivePlan, Collectives, CollectivesOptions,
    DevCommRequirements, ExpertParallelOptions, GinConnectionType, Parts, ReduceOp, Result, Tokens,
    kernels,
};
use devcomm_example_kernels as example_kernels;
use devcomm_testing::simulated::Gpu;
use half::bf16;
use reduce_copy_kernels::numbers;

use self::guide::*;
use self::products::*;

/// A program in which mutants run.
pub struct Program {
    pub name: &'static str,
    pub machine: fn() -> Simulation,
    /// The original runs in one of this number of schedules, so that slow ones run less often.
    pub one_in: u64,
    pub body: fn(&Gpu<'_>) -> Result<()>,
}

macro_rules! programs {
    ($($name:ident on $machine:expr, one in $one_in:literal;)*) => {
        pub const ALL: &[Program] = &[$(Program {
            name: stringify!($name),
            machine: || $machine,
            one_in: $one_in,
            body: $name,
        },)*];

        /// The unchanged programs.
        mod originals {
            $(
                #[test]
                fn $name() {
                    crate::passes(super::named(stringify!($name)));
                }
            )*
        }
    };
}

programs! {
    lsa_allreduce on Simulation::new(2), one in 1;
    rmsnorm_allreduce on Simulation::new(2), one in 1;
    ll_alltoall on Simulation::new(2), one in 1;
    numbers_of_ranks on Simulation::new(2), one in 1;
    numbers_of_threads on Simulation::new(1), one in 20;
    transposed_part on Simulation::new(1), one in 1;
    gin_put_signal on Simulation::new(2).team_size(1), one in 1;
    gin_alltoall on Simulation::new(2).team_size(1), one in 1;
    hybrid_allreduce on Simulation::new(4).team_size(2), one in 1;
    hybrid_alltoall on Simulation::new(4).team_size(2), one in 1;
    lamport_allreduce on Simulation::new(2), one in 20;
    push_allreduce on Simulation::new(2), one in 20;
    push_exchange on Simulation::new(2), one in 20;
    pull_reduce_scatter on Simulation::new(2), one in 20;
    lamport_exchange on Simulation::new(2), one in 20;
    lamport_exchange_v on Simulation::new(2), one in 20;
    push_exchange_v on Simulation::new(2), one in 20;
    lamport_reduce_scatter on Simulation::new(2), one in 20;
    lamport_rmsnorm on Simulation::new(2), one in 20;
    expert_parallel on Simulation::new(2), one in 20;
    ep_layout on Simulation::new(2), one in 20;
    ep_dispatch on Simulation::new(2), one in 20;
    ep_combine on Simulation::new(2), one in 20;
    ep_combine_in_one_round on Simulation::new(2), one in 20;
    ep_dispatch_f8 on Simulation::new(2), one in 20;
    ep_of_any_ranks on Simulation::new(3), one in 20;
    experts_counted on Simulation::new(3), one in 20;
    dispatches_counted on Simulation::new(2), one in 20;
    combines_counted on Simulation::new(2), one in 20;
    experts_in_teams on Simulation::new(4).team_size(2).multiprocessors(2), one in 20;
    dispatches_in_teams on Simulation::new(4).team_size(2).multiprocessors(2), one in 20;
    combines_in_teams on Simulation::new(4).team_size(2).multiprocessors(2), one in 20;
    gemm_wgmma on Simulation::new(1).multiprocessors(2), one in 50;
    gemm_swapped on Simulation::new(1).multiprocessors(2), one in 50;
    gemm_sliced on Simulation::new(1).multiprocessors(4), one in 50;
    gemm_unswapped on Simulation::new(1).multiprocessors(4), one in 50;
    gemm_blocks on Simulation::new(1).multiprocessors(2), one in 50;
    gemm_after_gemm on Simulation::new(1).multiprocessors(2), one in 50;
    gemm_grouped_swapped on Simulation::new(1).multiprocessors(1), one in 50;
    gemm_mma on Simulation::new(1).multiprocessors(2), one in 50;
    gemm_allreduce_mma on Simulation::new(2).multiprocessors(2), one in 50;
    gemm_allreduce_e4m3 on Simulation::new(2).multiprocessors(2), one in 50;
    gemm_allreduce_wide on Simulation::new(2).multiprocessors(2), one in 50;
    gemm_allreduce_wide_f8 on Simulation::new(2).multiprocessors(2), one in 50;
    allgather_gemm on Simulation::new(2).multiprocessors(2), one in 50;
    guide_few on Simulation::new(2).multiprocessors(2), one in 50;
    guide_wide on Simulation::new(2).multiprocessors(2), one in 50;
}

/// Returns the program of this name.
pub fn named(name: &str) -> &'static Program {
    ALL.iter().find(|program| program.name == name).unwrap_or_else(|| panic!("no program {name}"))
}

/// The launches of most kernels: two banks take turns, so the third launch uses one again.
const LAUNCHES: u8 = 3;

fn lsa_allreduce(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 300])?, gpu.window(&[0_f32; 300])?);
    let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(2))?;
    let stream = gpu.stream()?;
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        kernels::lsa_allreduce::<f32>::args(&comm, &send, &recv, 299)
            .grid(2)
            .block(32)
            .launch(&stream)?;
    }
    stream.synchronize()
}

fn rmsnorm_allreduce(gpu: &Gpu<'_>) -> Result<()> {
    let (input, output) = (gpu.window(&[1_f32; 256])?, gpu.window(&[0_f32; 256])?);
    let weight = gpu.buffer(&[1_f32; 64])?;
    let comm = gpu.dev_comm(DevCommRequirements::new().lsa_barriers(1))?;
    let stream = gpu.stream()?;
    for launch in 0..LAUNCHES {
        stream.fill(&input, f32::from(launch))?;
        let args = example_kernels::rmsnorm_allreduce::<f32>::args(
            &comm, &input, &weight, &output, 4, 64, 1e-5,
        );
        // SAFETY: the windows have 4 rows of 64 elements, the weights 64.
        unsafe { args.grid(1).block(64).launch(&stream)? };
    }
    stream.synchronize()
}

fn ll_alltoall(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 64])?, gpu.window(&[0_f32; 64])?);
    let mut requirements = DevCommRequirements::new();
    let exchange =
        requirements.add(devcomm::LlA2a { blocks: 1, max_elements: 16, element_size: 8 });
    let comm = gpu.dev_comm(requirements)?;
    let (exchange, stream) = (comm.resource(exchange)?, gpu.stream()?);
    for _ in 0..LAUNCHES {
        let args = example_kernels::ll_alltoall::<f32>::args(&comm, exchange, &send, &recv, 30);
        // SAFETY: the windows have 30 elements for each of two ranks.
        unsafe { args.grid(1).block(32).launch(&stream)? };
    }
    stream.synchronize()
}

fn numbers_of_ranks(gpu: &Gpu<'_>) -> Result<()> {
    let mut requirements = DevCommRequirements::new();
    let exchange = requirements.add(devcomm::LlA2a { blocks: 3, max_elements: 2, element_size: 8 });
    let comm = gpu.dev_comm(requirements)?;
    let (exchange, stream) = (comm.resource(exchange)?, gpu.stream()?);
    let out = gpu.buffer(&[0_u64; 64 * 3 * 2])?;
    for _ in 0..LAUNCHES {
        let args = numbers::all_reduce_numbers::args(&comm, exchange, &out, 2);
        // SAFETY: there are three sessions for the block, and three sums for each thread and round.
        unsafe { args.grid(1).block(64).launch(&stream)? };
    }
    stream.synchronize()
}

fn numbers_of_threads(gpu: &Gpu<'_>) -> Result<()> {
    let (x, stream) = (gpu.buffer(&[1_f32; 1024])?, gpu.stream()?);
    let out = gpu.buffer(&[0_f32; 1024 * numbers::RESULTS])?;
    // SAFETY: the buffers have the elements of 1,024 threads.
    unsafe { numbers::reduce_numbers::args(&x, &out).grid(1).block(1024).launch(&stream)? };
    stream.synchronize()
}

fn transposed_part(gpu: &Gpu<'_>) -> Result<()> {
    let (x, y) = (gpu.window(&[1_f32; 280])?, gpu.window(&[0_f32; 560])?);
    let stream = gpu.stream()?;
    let args = numbers::transpose_part::args(&x, &y, 7, 40, 3);
    // SAFETY: `x` has a matrix of these extents, and `y` two.
    unsafe { args.grid(2).block(64).launch(&stream)? };
    stream.synchronize()
}

fn signals() -> DevCommRequirements {
    DevCommRequirements::new().gin_connection(GinConnectionType::Full).gin_signals(2)
}

fn gin_put_signal(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_u8; 64])?, gpu.window(&[0_u8; 64])?);
    let nanos = gpu.buffer(&[0_u64; 4])?;
    let (comm, stream) = (gpu.dev_comm(signals())?, gpu.stream()?);
    for launch in 0..LAUNCHES {
        stream.fill(&send, launch)?;
        let args = kernels::gin_put_signal::args(&comm, &send, &recv, 8, 4, &nanos);
        // SAFETY: the windows have 32 bytes, and the buffer four times.
        unsafe { args.grid(1).block(32).launch(&stream)? };
        // The kernel requires that it has ended in every rank before the windows are used again.
        stream.synchronize()?;
        gpu.barrier()?;
    }
    Ok(())
}

fn gin_alltoall(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 64])?, gpu.window(&[0_f32; 64])?);
    let comm = gpu.dev_comm(signals().world_gin_barriers(1))?;
    let (stream, out) = (gpu.stream()?, gpu.buffer(&[0_f32; 64])?);
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        let args = example_kernels::gin_alltoall::<f32>::args(&comm, &send, &recv, 30);
        // SAFETY: the windows have 30 elements for each of two ranks.
        unsafe { args.grid(1).block(32).launch(&stream)? };
        stream.copy(&recv, &out)?;
    }
    stream.synchronize()
}

fn hybrid_allreduce(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 64])?, gpu.window(&[0_f32; 64])?);
    let partial = gpu.window(&vec![0_f32; example_kernels::hybrid_allreduce_partials(60, 2, 2)])?;
    let comm = gpu.dev_comm(signals().barriers(1))?;
    let stream = gpu.stream()?;
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        let args =
            example_kernels::hybrid_allreduce::<f32>::args(&comm, &send, &recv, &partial, 60);
        // SAFETY: the windows have the elements.
        unsafe { args.grid(1).block(32).launch(&stream)? };
    }
    stream.synchronize()
}

fn hybrid_alltoall(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 64])?, gpu.window(&[0_f32; 64])?);
    let comm = gpu.dev_comm(signals().barriers(1))?;
    let (stream, out) = (gpu.stream()?, gpu.buffer(&[0_f32; 64])?);
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        let args = example_kernels::hybrid_alltoall::<f32>::args(&comm, &send, &recv, 15);
        // SAFETY: the windows have 15 elements for each of four ranks.
        unsafe { args.grid(1).block(32).launch(&stream)? };
        stream.copy(&recv, &out)?;
    }
    stream.synchronize()
}

/// Returns collectives with a small workspace, so that its initialisation takes little of the run.
fn collectives(gpu: &Gpu<'_>) -> Result<Collectives> {
    CollectivesOptions::new().lamport_bytes(1 << 10).push_blocks(2).build(gpu.communicator()?)
}

/// Returns the plan with an algorithm, with two blocks.
fn plan_by(plans: Vec<CollectivePlan>, algorithm: Algorithm) -> Option<CollectivePlan> {
    let plan = plans.into_iter().find(|plan| plan.algorithm == algorithm);
    plan.map(|plan| CollectivePlan { blocks: 2, ..plan })
}

/// Runs all-reduces by one algorithm.
fn all_reduces(gpu: &Gpu<'_>, count: usize, algorithm: Algorithm) -> Result<()> {
    let (send, recv) = (gpu.window(&vec![1_f32; count])?, gpu.window(&vec![0_f32; count])?);
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    let plans = collectives.plans(&Collective::all_reduce(&send, &recv, ReduceOp::Sum))?;
    collectives.set_plan(plan_by(plans, algorithm));
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
        collectives.all_reduce(&recv, &send, ReduceOp::Sum, &stream)?;
    }
    stream.synchronize()
}

fn lamport_allreduce(gpu: &Gpu<'_>) -> Result<()> {
    all_reduces(gpu, 200, Algorithm::Lamport)
}

fn push_allreduce(gpu: &Gpu<'_>) -> Result<()> {
    all_reduces(gpu, 3000, Algorithm::Push)
}

fn push_exchange(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 128])?, gpu.window(&[0_f32; 256])?);
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    let plans = collectives.plans(&Collective::all_gather(&send, &recv))?;
    collectives.set_plan(plan_by(plans, Algorithm::Push));
    let out = gpu.buffer(&[0_f32; 256])?;
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.all_gather(&send, &recv, &stream)?;
        stream.copy(&recv, &out)?;
    }
    stream.synchronize()
}

fn pull_reduce_scatter(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.window(&[1_f32; 256])?, gpu.window(&[0_f32; 128])?);
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    let plans = collectives.plans(&Collective::reduce_scatter(&send, &recv, ReduceOp::Sum))?;
    collectives.set_plan(plan_by(plans, Algorithm::Pull));
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.reduce_scatter(&send, &recv, ReduceOp::Sum, &stream)?;
    }
    stream.synchronize()
}

fn lamport_exchange(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.buffer(&[1_f32; 40])?, gpu.buffer(&[0_f32; 80])?);
    let all = gpu.buffer(&[0_f32; 160])?;
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    let plans = collectives.plans(&Collective::all_gather(&send, &recv))?;
    collectives.set_plan(plan_by(plans, Algorithm::Lamport));
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.all_gather(&send, &recv, &stream)?;
        // Begins while the first one runs, whose output it sends.
        collectives.all_gather(&recv, &all, &stream)?;
    }
    stream.synchronize()
}

/// Runs all-to-alls of unequal messages, of up to `count` elements.
fn exchanges_v(gpu: &Gpu<'_>, count: usize) -> Result<()> {
    let counts = [[2, count], [count - 1, 3]];
    let me = gpu.rank();
    let sent = Parts { counts: &counts[me], offsets: &[0, count] };
    let received = Parts { counts: &[counts[0][me], counts[1][me]], offsets: &[0, count] };
    let (send, recv) = (gpu.window(&vec![1_f32; 2 * count])?, gpu.window(&vec![0_f32; 2 * count])?);
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.all_to_all_v(&send, sent, &recv, received, &stream)?;
    }
    stream.synchronize()
}

fn lamport_exchange_v(gpu: &Gpu<'_>) -> Result<()> {
    exchanges_v(gpu, 40)
}

fn push_exchange_v(gpu: &Gpu<'_>) -> Result<()> {
    exchanges_v(gpu, 3000)
}

fn lamport_reduce_scatter(gpu: &Gpu<'_>) -> Result<()> {
    let (send, recv) = (gpu.buffer(&[1_f32; 80])?, gpu.buffer(&[0_f32; 40])?);
    let half = gpu.buffer(&[0_f32; 20])?;
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    let plans = collectives.plans(&Collective::reduce_scatter(&send, &recv, ReduceOp::Sum))?;
    collectives.set_plan(plan_by(plans, Algorithm::Lamport));
    for launch in 0..LAUNCHES {
        stream.fill(&send, f32::from(launch))?;
        collectives.reduce_scatter(&send, &recv, ReduceOp::Sum, &stream)?;
        // Begins while the first one runs, whose output it sends.
        collectives.reduce_scatter(&recv, &half, ReduceOp::Sum, &stream)?;
    }
    stream.synchronize()
}

/// Runs steps of expert parallelism with the given numbers of operations, by blocks of a warp.
fn experts(
    gpu: &Gpu<'_>,
    [steps, dispatches, groups, combines]: [u8; 4],
    blocks: u32,
    form: fn(ExpertParallelOptions) -> ExpertParallelOptions,
) -> Result<()> {
    const TOKENS: usize = 3;
    const HIDDEN: usize = 128;
    let comm = gpu.communicator()?;
    let options = ExpertParallelOptions::new(HIDDEN, TOKENS, 2 * comm.n_ranks(), 2);
    let (experts, stream) = (form(options.blocks(blocks).threads(32)).build(comm)?, gpu.stream()?);
    let row = [bf16::ONE; TOKENS * HIDDEN];
    let (input, output) = (gpu.buffer(&row)?, gpu.buffer(&row)?);
    // A token with an expert in each rank, one with an expert twice, and one with one.
    let (ids, weights) = (gpu.buffer(&[0, 3, 1, 1, 2, -1])?, gpu.buffer(&[0.5_f32; 6])?);
    // The tokens arrive in these rows if they arrive in the order of the experts.
    let rows = match experts.rows() {
        Ok(rows) => rows,
        Err(_) => gpu.buffer(&vec![bf16::ZERO; experts.most_rows() * HIDDEN])?.device_slice(),
    };
    for _ in 0..steps {
        for _ in 0..dispatches {
            let tokens = Tokens { count: TOKENS, input: &input, ids: &ids, weights: &weights };
            experts.dispatch(tokens, &stream)?;
        }
        for _ in 0..groups {
            experts.group(&rows, &stream)?;
        }
        for _ in 0..combines {
            experts.combine(&rows, &output, None, &stream)?;
        }
    }
    stream.synchronize()
}

/// Runs with a block for each row that a rank receives.
fn expert_parallel(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 1], 6, |options| options)
}

/// Runs with several rows for each block, which has two warps.
fn ep_layout(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 0], 2, |options| options.threads(64))
}

/// Runs the steps of expert parallelism over several LSA teams.
fn experts_in_teams(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 1], 2, |options| options)
}

/// Runs dispatches without combines, which would keep the ranks' dispatches apart.
fn dispatches_in_teams(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 0], 2, |options| options)
}

/// Runs combines without a dispatch between them.
fn combines_in_teams(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, 1, 1, LAUNCHES], 2, |options| options)
}

fn ep_dispatch(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, LAUNCHES, 0, 0], 2, |options| options)
}

fn ep_dispatch_f8(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, LAUNCHES, 0, 0], 2, ExpertParallelOptions::f8)
}

fn ep_combine(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, 1, 1, LAUNCHES], 2, |options| options)
}

/// Runs with a warp for each part of a row.
fn ep_combine_in_one_round(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, 1, 1, LAUNCHES], 6, |options| options)
}

fn for_throughput(options: ExpertParallelOptions) -> ExpertParallelOptions {
    options.throughput(usize::MAX)
}

/// Runs the form for high throughput, in which the ranks exchange counts first.
fn experts_counted(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 1], 2, for_throughput)
}

/// Runs dispatches without combines, which would keep the ranks' dispatches apart.
fn dispatches_counted(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 0], 2, for_throughput)
}

/// Runs combines without a dispatch between them.
fn combines_counted(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [1, 1, 1, LAUNCHES], 2, for_throughput)
}

/// Runs with three ranks, a number for which no kernel is specialised.
fn ep_of_any_ranks(gpu: &Gpu<'_>) -> Result<()> {
    experts(gpu, [LAUNCHES, 1, 1, 1], 2, |options| options)
}

fn lamport_rmsnorm(gpu: &Gpu<'_>) -> Result<()> {
    let (input, output) = (gpu.buffer(&[1_f32; 128])?, gpu.buffer(&[0_f32; 128])?);
    let (residual, weight) = (gpu.buffer(&[0_f32; 128])?, gpu.buffer(&[1_f32; 64])?);
    let (collectives, stream) = (collectives(gpu)?, gpu.stream()?);
    for launch in 0..LAUNCHES {
        stream.fill(&input, f32::from(launch))?;
        collectives.all_reduce_rmsnorm(&input, &residual, &weight, &output, 1e-5, &stream)?;
    }
    stream.synchronize()
}
