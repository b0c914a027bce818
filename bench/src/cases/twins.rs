//! Compares kernels in Rust with their twins in CUDA C++: same work, grid, block and memory,
//! assembled by the same ptxas.
//!
//! Three modules are timed: the Rust kernels, the C++ kernels, and the C++ kernels loaded a second
//! time, whose distance from the first is the measurement noise.

use std::path::PathBuf;

use anyhow::bail;
use devcomm::{GinType, Kernel, Kernels, device, kernels};
use devcomm_bench_kernels as bench_kernels;
use devcomm_testing::numbers::Number;
use half::{bf16, f16};

use super::collectives::for_types;
use super::prelude::*;
use super::workloads::{AllReduce, Barrier, KernelInfo, LlExchange, Message, Put, Workload};
use crate::base::TwinFiles;
use crate::base::options::{Dtype, LARGEST};

/// The help of `--blocks`: those of `lsa_barrier` do not depend on a size.
const BLOCKS_HELP: &str =
    "Blocks of a kernel [default: chosen by size; of `lsa_barrier` 1, then 16, then 64]";
const THREADS_HELP: &str =
    "Threads of a block [default: the kernel's; of `lsa_barrier` 128, then 512]";

/// The flags of `twins`.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("blocks", |arg| arg.help(BLOCKS_HELP)))]
#[command(mut_arg("threads", |arg| arg.help(THREADS_HELP)))]
pub struct Twins {
    /// Only these pairs [default: all]
    #[arg(value_name = "KERNEL")]
    kernels: Vec<String>,

    #[command(flatten)]
    sizes: SizeOptions,

    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value = "all")]
    dtype: Dtype,

    #[command(flatten)]
    grid: GridOptions,
}

impl Benchmark for Twins {
    const NAME: &'static str = "twins";
    const NEEDS_TWINS: bool = true;

    fn validate(&self) -> Result<()> {
        for name in &self.kernels {
            ensure!(
                PAIRS.iter().any(|(known, _)| known == name),
                "there is no pair `{name}`; there are: {}",
                PAIRS.map(|(known, _)| known).join(", ")
            );
        }
        self.dtype.require_float("twins")?;
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        harness.comm.require_single_lsa_team()?;
        let files = TwinFiles::find(job.twins)?;
        let wanted = |name: &str| self.kernels.is_empty() || self.kernels.iter().any(|k| k == name);
        let (present, missing): (Vec<Pair>, Vec<Pair>) = PAIRS
            .into_iter()
            .filter(|(name, _)| wanted(name))
            .partition(|(name, _)| files.has(name));
        let names = |pairs: &[Pair]| pairs.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        let folder = files.folder().display();
        if present.is_empty() {
            bail!("{folder} has none of the pairs {}", names(&missing).join(", "));
        }
        // SAFETY: `cargo xtask twins` has compiled the modules from the kernels of these names.
        let load = |paths: Vec<PathBuf>| unsafe {
            Kernels::load_files(harness.rank.context(), &paths).context("the twins do not load")
        };
        let (rust, cpp) = (files.rust(&names(&present)), || files.cpp(&names(&present)));
        let compiled = [
            (Variant::Rust, load(rust)?),
            (Variant::Cpp, load(cpp())?),
            (Variant::CppAgain, load(cpp())?),
        ];
        job.begin()?;
        let mut run = Run { job, twins: self, compiled: &compiled };
        missing.iter().for_each(|(name, _)| run.omit(name, &format!("it is not in {folder}")));
        present.iter().try_for_each(|(_, pair)| pair(&mut run))
    }
}

/// A rank's run.
struct Run<'a, 'b> {
    job: &'a mut Job<'b>,
    twins: &'a Twins,
    /// Rust, C++, and C++ again.
    compiled: &'a [(Variant, Kernels)],
}

impl Run<'_, '_> {
    /// Checks and times the modules. *Collective*.
    fn row(
        &mut self,
        (kernel, dtype, size): (&'static str, &'static str, usize),
        contenders: Vec<Contender<'_>>,
    ) -> Result<()> {
        let mut all = Vec::new();
        for contender in contenders {
            let registers = contender.launch.unwrap_or_default().registers;
            all.push(contender.by_algorithm(format!("{registers} registers")));
        }
        self.job.compare(Case { size, dtype, redop: kernel, ..Case::NONE }, &all)
    }

    /// Prints that a pair cannot run here.
    fn omit(&self, name: &str, why: &str) {
        if self.job.harness.rank.is_root() {
            println!("# left out: {name}: {why}");
        }
    }
}

/// A pair: the file stem of its modules, and the function that runs it.
type Pair = (&'static str, fn(&mut Run<'_, '_>) -> Result<()>);

/// All pairs. To add one, add a line here and a function that creates its workloads.
const PAIRS: [Pair; 5] = [
    ("lsa_barrier", lsa_barrier),
    ("lsa_allreduce", lsa_allreduce),
    ("reduce_copy", reduce_copy),
    ("ll_exchange", ll_exchange),
    ("gin_put", gin_put),
];

/// Counts that divide neither into 16-byte vectors nor among two ranks: checked, not timed.
const UNEVEN_COUNTS: [usize; 6] = [1, 7, 17, 1023, 4099, 65537];
/// The most bytes of low-latency exchanges, which are for short messages, and of puts, of which
/// longer ones measure only the network.
const LARGEST_MESSAGE: usize = 1 << 20;
/// Round trips per launch.
const ROUNDS: u32 = 50;

fn lsa_barrier(run: &mut Run<'_, '_>) -> Result<()> {
    let grid = &run.twins.grid;
    let blocks = grid.blocks.map_or(Barrier::BLOCKS.to_vec(), |blocks| vec![blocks]);
    let threads = grid.threads.map_or(vec![128, 512], |threads| vec![threads]);
    for threads in threads {
        for &blocks in &blocks {
            let workload = Barrier::new(run.job.harness, blocks, threads)?;
            run.row(("lsa_barrier", "-", 0), workload.contenders(run.compiled)?)?;
        }
    }
    Ok(())
}

fn lsa_allreduce(run: &mut Run<'_, '_>) -> Result<()> {
    let info = KernelInfo { threads: 128, max_blocks: 128, rounds_partial_sums: false };
    for_types!(run.twins.dtype, T in [f32, f16, bf16] => {
        all_reduce::<T, kernels::lsa_allreduce<T>>(run, "lsa_allreduce", info)?;
    });
    Ok(())
}

fn reduce_copy(run: &mut Run<'_, '_>) -> Result<()> {
    let info = KernelInfo { threads: 256, max_blocks: 64, rounds_partial_sums: true };
    for_types!(run.twins.dtype, T in [f32, f16, bf16] => {
        all_reduce::<T, bench_kernels::reduce_copy<T>>(run, "reduce_copy", info)?;
    });
    Ok(())
}

fn all_reduce<T, K>(run: &mut Run<'_, '_>, name: &'static str, info: KernelInfo) -> Result<()>
where
    T: Number,
    K: Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
{
    let (harness, compiled, twins) = (run.job.harness, run.compiled, run.twins);
    let workload = |count| AllReduce::<T, K>::new(harness, &twins.grid, info, count);
    for count in twins.sizes.counts(LARGEST, size_of::<T>())? {
        let row = (name, T::NAME, count * size_of::<T>());
        run.row(row, workload(count)?.contenders(compiled)?)?;
    }
    for count in UNEVEN_COUNTS {
        let wrong = harness.check(&workload(count)?.contenders(compiled)?)?;
        let [rust, cpp] = [0, 1].map(|i| wrong[i].unwrap_or_default());
        ensure!(
            rust == 0 && cpp == 0,
            "{name} of {} with {count} elements: {rust} are wrong in Rust's result, {cpp} in C++'s",
            T::NAME
        );
    }
    Ok(())
}

fn ll_exchange(run: &mut Run<'_, '_>) -> Result<()> {
    for size in sizes(run) {
        let workload = LlExchange::new(run.job.harness, &run.twins.grid, size)?;
        run.row(("ll_exchange", "u64", workload.bytes()), workload.contenders(run.compiled)?)?;
    }
    Ok(())
}

/// Runs the pair `gin_put`, which needs GIN's back end PROXY and two ranks.
fn gin_put(run: &mut Run<'_, '_>) -> Result<()> {
    let harness = run.job.harness;
    if !harness.comm.properties()?.gin_types.contains(GinType::Proxy) {
        run.omit("gin_put", "NCCL offers no GIN of type PROXY here");
        return Ok(());
    }
    if harness.rank.n_ranks() < 2 {
        run.omit("gin_put", "it needs two ranks");
        return Ok(());
    }
    for bytes in [8].into_iter().chain(sizes(run)) {
        let windows = [harness.comm.window(bytes)?, harness.comm.window(bytes)?];
        let message = Message::new(harness, &windows[0], &windows[1])?;
        let put = Put::over_gin(&message, &windows, ROUNDS)?;
        run.row(("gin_put", "u8", bytes), put.contenders(run.compiled)?)?;
    }
    Ok(())
}

/// Returns the message sizes of low-latency exchanges and puts.
fn sizes(run: &Run<'_, '_>) -> Vec<usize> {
    let sizes = run.twins.sizes.sizes(LARGEST_MESSAGE);
    sizes.take_while(|size| *size <= LARGEST_MESSAGE).collect()
}
