//! The kernel on GPUs, beside `ncclAllReduce`.

use anyhow::ensure;
use comfy_table::{CellAlignment, Table, presets};
use devcomm::{
    Buffer, Communicator, DevCommRequirements, DevCommResource, DeviceSlice, Event, KERNELS,
    Kernel, Kernels, LaunchConfig, Rank, ReduceOp, Stream, World, device, kernels,
};
use half::{bf16, f16};

use crate::check::{Number, checksum, count_wrong, inputs};
use crate::options::{Dtype, ODD_COUNTS, Options};

const DEFAULT_MAX: usize = 256 << 20;
/// Blocks for large messages; a small one takes as many as give each thread one 16-byte vector of its rank's share.
const MAX_BLOCKS: u32 = 128;
/// Kernel and NCCL are timed in turns, and the median turn counts.
const TURNS: usize = 11;
/// What a message takes on each GPU: two windows for the kernel, two buffers for NCCL, in whole pages.
const BUFFERS: usize = 4;
const PAGE: usize = 2 << 20;

/// Runs this process's ranks.
pub fn run(world: &World, options: &Options) -> anyhow::Result<()> {
    world.run(|rank| run_rank(rank, options))?;
    Ok(())
}

fn run_rank(rank: &Rank, options: &Options) -> anyhow::Result<()> {
    let comm = rank.communicator()?;
    comm.require_single_lsa_team()?;
    let max_blocks = options.blocks.unwrap_or(MAX_BLOCKS);
    let mut job = Job {
        rank,
        kernels: rank.load(&KERNELS)?,
        dev_comm: comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(max_blocks))?,
        stream: rank.stream()?,
        events: (rank.context().event()?, rank.context().event()?),
        comm,
        options,
        max_blocks,
        wrong: [0; 2],
        table: Table::new(),
    };
    job.head()?;
    let measured = job.run_types();
    job.finish(measured)
}

struct Job<'a> {
    rank: &'a Rank,
    comm: &'a Communicator,
    kernels: Kernels,
    dev_comm: DevCommResource,
    stream: Stream,
    events: (Event, Event),
    options: &'a Options,
    max_blocks: u32,
    /// Wrong elements over all ranks, the kernel's and NCCL's.
    wrong: [usize; 2],
    table: Table,
}

impl Job<'_> {
    fn head(&mut self) -> anyhow::Result<()> {
        self.table.load_style(presets::NOTHING);
        self.table.set_header([
            "size",
            "count",
            "type",
            "redop",
            "blocks",
            "time",
            "algbw",
            "busbw",
            "#wrong",
            "nccl",
            "busbw",
            "#wrong",
            "kernel/nccl",
        ]);
        self.table.add_row([
            "B", "elements", "", "", "", "us", "GB/s", "GB/s", "", "us", "GB/s", "", "time",
        ]);
        if self.rank.is_root() {
            println!(
                "{} x {}, NCCL {}, {} threads a block; time: median of {TURNS} turns, slowest rank\n",
                self.rank.n_ranks(),
                self.rank.context().device_name()?,
                self.comm.library().version(),
                self.options.threads,
            );
        }
        Ok(())
    }

    /// Prints what was measured, also when that is not all, and gives the verdict.
    fn finish(mut self, measured: anyhow::Result<()>) -> anyhow::Result<()> {
        const UNITS: usize = 1;
        if self.rank.is_root() && self.table.row_count() > UNITS {
            for column in self.table.column_iter_mut() {
                column.set_cell_alignment(CellAlignment::Right);
            }
            println!("{}\n", self.table);
        }
        measured?;
        let [ours, nccls] = self.wrong;
        ensure!(
            self.wrong == [0; 2],
            "{ours} elements of the kernel's results are wrong, and {nccls} of ncclAllReduce's"
        );
        if self.rank.is_root() {
            println!("PASS");
        }
        Ok(())
    }

    fn run_types(&mut self) -> anyhow::Result<()> {
        if self.options.wants(Dtype::F32) {
            self.run_type::<f32>()?;
        }
        if self.options.wants(Dtype::F16) {
            self.run_type::<f16>()?;
        }
        if self.options.wants(Dtype::Bf16) {
            self.run_type::<bf16>()?;
        }
        Ok(())
    }

    fn run_type<T: Number>(&mut self) -> anyhow::Result<()>
    where
        kernels::lsa_allreduce<T>:
            Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
    {
        let even = self.options.sizes(DEFAULT_MAX).into_iter().map(|size| size / size_of::<T>());
        for count in even.filter(|&count| count > 0) {
            self.run_count::<T>(count, true)?;
        }
        for count in ODD_COUNTS {
            self.run_count::<T>(count, false)?;
        }
        Ok(())
    }

    /// Checks one message size, and with `timed` measures it.
    fn run_count<T: Number>(&mut self, count: usize, timed: bool) -> anyhow::Result<()>
    where
        kernels::lsa_allreduce<T>:
            Kernel<Args = (device::DevComm, device::Window<T>, device::Window<T>, usize)>,
    {
        let (rank, n_ranks, seed) = (self.rank.rank(), self.rank.n_ranks(), self.options.seed);
        self.require_memory(count * size_of::<T>())?;
        let (send, recv) = (self.comm.window::<T>(count)?, self.comm.window::<T>(count)?);
        let (nccl_send, nccl_recv) =
            (self.comm.mem_alloc::<T>(count)?, self.comm.mem_alloc::<T>(count)?);
        let input = inputs::<T>(seed, rank, count);
        send.copy_from_host(&input)?;
        nccl_send.copy_from_host(&input)?;
        drop(input);
        // An element that nobody writes stays a NaN.
        recv.fill(0xff)?;
        nccl_recv.fill(0xff)?;

        let config =
            LaunchConfig::new(self.blocks_for(count * size_of::<T>()), self.options.threads);
        let kernel = || {
            let args = (&self.dev_comm, &send, &recv, count);
            // SAFETY: both windows have `count` elements in every rank; they live until the stream is idle below.
            unsafe { self.kernels.launch(&self.stream, kernels::lsa_allreduce::<T>, config, args) }
        };
        let nccl = || self.comm.all_reduce(&nccl_send, &nccl_recv, ReduceOp::Sum, &self.stream);
        kernel()?;
        nccl()?;
        self.stream.synchronize()?;

        let checked = |result: &DeviceSlice<T>, roundings| -> anyhow::Result<(u64, usize)> {
            let mut on_host = vec![T::nearest(0.0); count];
            result.copy_to_host(&mut on_host)?;
            Ok((checksum(&on_host), count_wrong(seed, n_ranks, roundings, &on_host)))
        };
        let (sum, ours) = checked(&recv.device_slice(), 1)?;
        let (_, nccls) = checked(&nccl_recv.device_slice(), (n_ranks - 1).max(1))?;
        ensure!(self.all_equal(sum)?, "the ranks' results differ");
        let wrong = self.sum([ours, nccls])?;
        self.wrong = std::array::from_fn(|i| self.wrong[i] + wrong[i]);
        if !timed {
            return Ok(());
        }

        // Short messages in batches, so that the launch is not all that is measured.
        let batch = ((4 << 20) / (count * size_of::<T>())).clamp(4, 40);
        let mut turns = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            turns[0].push(self.time(batch, kernel)?);
            turns[1].push(self.time(batch, nccl)?);
        }
        let [time, nccl_time] = self.slowest(turns.map(median))?;
        let bytes = (count * size_of::<T>()) as f64;
        let bus = 2.0 * (n_ranks - 1) as f64 / n_ranks as f64;
        self.table.add_row([
            format!("{bytes}"),
            count.to_string(),
            T::NAME.to_string(),
            "sum".to_string(),
            config.grid.x.to_string(),
            format!("{:.2}", time * 1e6),
            format!("{:.2}", bytes / time / 1e9),
            format!("{:.2}", bus * bytes / time / 1e9),
            wrong[0].to_string(),
            format!("{:.2}", nccl_time * 1e6),
            format!("{:.2}", bus * bytes / nccl_time / 1e9),
            wrong[1].to_string(),
            format!("{:.3}", time / nccl_time),
        ]);
        Ok(())
    }

    /// Fails on every rank unless each GPU has room for a message of `bytes`.
    fn require_memory(&self, bytes: usize) -> anyhow::Result<()> {
        let buffer = bytes.checked_next_multiple_of(PAGE).unwrap_or(usize::MAX);
        let need = buffer.saturating_mul(BUFFERS);
        let (free, _total) = self.rank.context().memory_info()?;
        let all = self.gather(u128::from(free as u64).to_le_bytes())?;
        let all = all.iter().map(|row| u64::from_le_bytes(half_of(row, 0)) as usize);
        if let Some((rank, free)) = all.enumerate().min_by_key(|(_, free)| *free) {
            let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
            ensure!(
                need <= free,
                "a message of {bytes} bytes needs {:.2} GiB on each GPU ({BUFFERS} buffers), and that of rank {rank} has \
                 {:.2} GiB free; lower --max",
                gib(need),
                gib(free)
            );
        }
        Ok(())
    }

    fn blocks_for(&self, bytes: usize) -> u32 {
        let share = bytes.div_ceil(self.rank.n_ranks());
        let wanted = share.div_ceil(16 * self.options.threads as usize) as u32;
        self.options.blocks.unwrap_or(wanted.clamp(1, self.max_blocks))
    }

    /// Seconds that one call of `work` takes on the GPU, over a batch.
    fn time(&self, batch: usize, work: impl Fn() -> devcomm::Result<()>) -> anyhow::Result<f64> {
        self.stream.synchronize()?;
        self.rank.barrier()?;
        work()?;
        self.stream.record(&self.events.0)?;
        for _ in 0..batch {
            work()?;
        }
        self.stream.record(&self.events.1)?;
        self.stream.synchronize()?;
        let ms = self.events.1.elapsed_ms(&self.events.0)?;
        Ok(f64::from(ms) / 1e3 / batch as f64)
    }

    fn gather(&self, mine: [u8; 16]) -> anyhow::Result<Vec<[u8; 16]>> {
        let all = self.rank.all_gather(&mine)?;
        Ok(all.iter().map(|bytes| bytes.as_slice().try_into()).collect::<Result<_, _>>()?)
    }

    fn all_equal(&self, mine: u64) -> anyhow::Result<bool> {
        let all = self.gather(u128::from(mine).to_le_bytes())?;
        Ok(all.iter().all(|other| *other == all[0]))
    }

    fn sum(&self, mine: [usize; 2]) -> anyhow::Result<[usize; 2]> {
        let all = self.gather(pair(mine.map(|x| (x as u64).to_le_bytes())))?;
        let column = |i: usize| {
            all.iter().map(|row| u64::from_le_bytes(half_of(row, i)) as usize).sum::<usize>()
        };
        Ok([column(0), column(1)])
    }

    fn slowest(&self, mine: [f64; 2]) -> anyhow::Result<[f64; 2]> {
        let all = self.gather(pair(mine.map(f64::to_le_bytes)))?;
        let column = |i: usize| {
            all.iter().map(|row| f64::from_le_bytes(half_of(row, i))).fold(0.0, f64::max)
        };
        Ok([column(0), column(1)])
    }
}

fn pair([a, b]: [[u8; 8]; 2]) -> [u8; 16] {
    std::array::from_fn(|i| if i < 8 { a[i] } else { b[i - 8] })
}

fn half_of(row: &[u8; 16], i: usize) -> [u8; 8] {
    std::array::from_fn(|byte| row[8 * i + byte])
}

fn median(mut turns: Vec<f64>) -> f64 {
    turns.sort_by(f64::total_cmp);
    turns[turns.len() / 2]
}
