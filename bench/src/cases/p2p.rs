//! Copies between neighbouring ranks: by loads, stores and TMA of a kernel, and by the copy engine,
//! against `ncclSend`.

use devcomm::{
    Buffer, DataType, DevCommRequirements, DevCommResource, FunctionInfo, Kernels, LaunchConfig,
    TensorMap, TensorMapDesc, Window,
};
use devcomm_bench_kernels::{TMA_ROW, TMA_ROWS, TMA_SHARED, p2p_copy, p2p_tma};

use super::benchmark::{SIMULATED_BLOCKS, SIMULATED_LARGEST};
use super::operation::{memory, nccl_variants};
use super::prelude::*;
use super::signal::peer_slice;
use crate::base::options::LARGEST;
use crate::base::ranks;
use crate::cases::workloads::Message;

/// The flags of `p2p`.
#[derive(Args, Clone, Debug)]
pub struct P2p {
    #[command(flatten)]
    sizes: SizeOptions,

    #[command(flatten)]
    grid: GridOptions,

    /// Copy in both directions at once; a row has the bandwidth of one
    #[arg(long)]
    both: bool,
}

/// Threads per block and maximum blocks of the kernel that loads and stores.
const THREADS: u32 = 512;
const MAX_BLOCKS: u32 = 128;
/// Rows of the smallest tile, and maximum blocks, of the kernel that copies by TMA.
const FEWEST_ROWS: u32 = 8;
const MAX_TMA_BLOCKS: u32 = 64;

impl Benchmark for P2p {
    const NAME: &'static str = "p2p";

    fn validate(&self) -> Result<()> {
        self.sizes.validate()?;
        self.grid.validate()
    }

    fn run(&self, job: &mut Job<'_>) -> Result<()> {
        let harness = job.harness;
        ensure!(harness.rank.n_ranks() >= 2, "a copy needs two ranks, and there is one");
        harness.comm.require_single_lsa_team()?;
        let compiled = Kernels::load(harness.rank.context(), &crate::base::KERNELS)?;
        let row = harness.comm.window::<u8>(TMA_ROW as usize)?;
        let refused = map(harness, row.device_slice().device_address(), [1, 1]).err();
        if ranks::total(harness.rank, usize::from(refused.is_some()))? > 0 {
            let why = refused.map_or("another rank's GPU has none".to_owned(), |e| e.to_string());
            job.selection.omit(Variant::Tma, why)?;
        }
        let nccl = job.nccl()?;
        job.begin()?;
        let dev_comm = harness.comm.create_dev_comm(DevCommRequirements::new())?;
        for bytes in self.sizes.sizes(harness.choose(LARGEST, SIMULATED_LARGEST)) {
            let windows = [harness.comm.window(bytes)?, harness.comm.window(bytes)?];
            let (compiled, dev_comm, both) = (&compiled, &dev_comm, self.both);
            let copies = Copies { harness, compiled, dev_comm, windows: &windows, both };
            let mut contenders = Vec::new();
            let (selection, grid) = (&job.selection, &self.grid);
            for variant in [Variant::Read, Variant::Write] {
                contenders.extend(selection.make(variant, || copies.by_kernel(variant, grid))?);
            }
            if bytes.is_multiple_of(TMA_ROW as usize) {
                contenders.extend(selection.make(Variant::Tma, || copies.by_tma(grid))?);
            }
            contenders.extend(selection.make(Variant::CopyEngine, || copies.by_copy_engine())?);
            for (variant, (_, nccl)) in nccl_variants(selection, &nccl, false) {
                contenders.push(copies.by_nccl(variant, nccl)?);
            }
            let (size, count) = (bytes, bytes);
            let case = Case { size, count, dtype: "u8", ..Case::NONE };
            job.compare(case, &contenders)?;
        }
        Ok(())
    }
}

/// Returns the map of rows of bytes.
fn map(harness: &Harness<'_>, address: u64, [rows, tile_rows]: [u32; 2]) -> Result<TensorMap> {
    let (columns, data_type) = (TMA_ROW, DataType::Uint8);
    let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
    Ok(harness.rank.context().tensor_map(&desc)?)
}

/// The copies of one size.
#[derive(Clone, Copy)]
struct Copies<'a> {
    harness: &'a Harness<'a>,
    compiled: &'a Kernels,
    dev_comm: &'a DevCommResource,
    /// The one to send from, and the one to receive in.
    windows: &'a [Window<u8>; 2],
    /// Whether odd ranks copy too, and not only even ones.
    both: bool,
}

impl<'a> Copies<'a> {
    /// Returns the copies of a checked launch of a kernel, and those of a timed one: enough to hide
    /// the launch, within a limit of bytes.
    fn rounds(&self) -> [u32; 2] {
        [1, ((64 << 20) / self.windows[0].len()).clamp(2, 200) as u32]
    }

    /// Returns the peer, if this rank copies.
    fn peer(&self) -> Option<usize> {
        let rank = self.harness.rank;
        let peer = Some(rank.rank() ^ 1).filter(|peer| *peer < rank.n_ranks());
        peer.filter(|_| self.both || rank.rank().is_multiple_of(2))
    }

    /// Returns the result between these buffers. A rank receives if it reads, or if its peer writes
    /// to it.
    fn message(
        &self,
        reads: bool,
        buffers: &[impl Buffer<Element = u8>; 2],
    ) -> Result<Message<'a>> {
        let is_even = self.harness.rank.rank().is_multiple_of(2);
        let message = Message::new(self.harness, &buffers[0], &buffers[1])?;
        Ok(message.received(self.both || reads == is_even))
    }

    /// Returns a contender whose kernel is launched with a number of rounds by the ranks that copy.
    fn contender(
        self,
        variant: Variant,
        launch: impl Fn(u32) -> devcomm::Result<()> + 'a,
        (config, info): (LaunchConfig, FunctionInfo),
    ) -> Result<Contender<'a>> {
        let message = self.message(variant == Variant::Read, self.windows)?;
        let copies = self.peer().is_some();
        let launch = move |rounds| if copies { launch(rounds) } else { Ok(()) };
        let contender = Contender::in_rounds(variant, launch, self.rounds(), 1, message);
        Ok(contender.by_kernel(config, info))
    }

    fn by_kernel(self, variant: Variant, grid: &GridOptions) -> Result<Contender<'a>> {
        let Self { harness, compiled, dev_comm, windows: [send, recv], .. } = self;
        let bytes = send.len();
        let max_blocks = harness.choose(MAX_BLOCKS, SIMULATED_BLOCKS);
        let (blocks, threads) = grid.grid(bytes, THREADS, max_blocks);
        let config = LaunchConfig::new(blocks, threads);
        let launch = move |rounds| {
            let reads = variant == Variant::Read;
            let copy = p2p_copy::args(dev_comm, send, recv, bytes, reads, rounds);
            // SAFETY: the windows have the bytes on every rank, which synchronises its stream
            // before it drops them; all ranks are in one LSA team.
            unsafe { copy.config(config).launch(&compiled.on(&harness.stream)) }
        };
        self.contender(variant, launch, (config, compiled.info::<p2p_copy>()?))
    }

    fn by_tma(self, grid: &GridOptions) -> Result<Contender<'a>> {
        let Self { harness, compiled, windows: [send, recv], .. } = self;
        let rows = (send.len() / TMA_ROW as usize) as u32;
        // The tiles are those of which each of MAX_TMA_BLOCKS blocks copies one, within the limits.
        let tile_rows = rows.div_ceil(MAX_TMA_BLOCKS).clamp(FEWEST_ROWS, TMA_ROWS);
        let max_blocks = harness.choose(MAX_TMA_BLOCKS, SIMULATED_BLOCKS);
        let blocks = grid.blocks.unwrap_or(rows.div_ceil(tile_rows).min(max_blocks));
        let config = LaunchConfig::new(blocks, 32).with_dynamic_shared(TMA_SHARED);
        // A rank that does not copy launches nothing.
        let theirs = self.peer().map(|peer| peer_slice(harness, recv, peer)).transpose()?;
        let to = theirs.unwrap_or_else(|| recv.device_slice()).device_address();
        let from = send.device_slice().device_address();
        let map = |address| map(harness, address, [rows, tile_rows]);
        let maps = [map(from)?, map(to)?];
        let launch = move |rounds| {
            let copy = p2p_tma::args(maps[0], maps[1], rows, tile_rows, rounds);
            // SAFETY: the maps are of the windows, which every rank drops after it has synchronised
            // its stream.
            unsafe { copy.config(config).launch(&compiled.on(&harness.stream)) }
        };
        self.contender(Variant::Tma, launch, (config, compiled.info::<p2p_tma>()?))
    }

    fn by_copy_engine(self) -> Result<Contender<'a>> {
        let Self { harness, windows: [send, recv], .. } = self;
        let theirs = self.peer().map(|peer| peer_slice(harness, recv, peer)).transpose()?;
        let work = move || theirs.iter().try_for_each(|theirs| harness.stream.copy(send, theirs));
        Ok(Contender::new(Variant::CopyEngine, work, self.message(false, self.windows)?))
    }

    fn by_nccl(self, variant: Variant, nccl: &'a Nccl<'_>) -> Result<Contender<'a>> {
        let Harness { stream, rank, .. } = self.harness;
        let (comm, bytes) = (nccl.comm(), self.windows[0].len());
        let buffers = memory::<u8>(comm, variant, [bytes; 2])?;
        let message = self.message(false, &buffers)?;
        let [send, recv] = buffers;
        let (me, both, peer) = (rank.rank(), self.both, message.peer());
        let work = move || {
            let Some(peer) = peer else { return Ok(()) };
            match (both, me.is_multiple_of(2)) {
                (true, _) => devcomm::group(|_| {
                    comm.send(&send, peer, stream)?;
                    comm.recv(&recv, peer, stream)
                }),
                (false, true) => comm.send(&send, peer, stream),
                (false, false) => comm.recv(&recv, peer, stream),
            }
        };
        Ok(Contender::new(variant, work, message).configured(nccl.name.as_ref()))
    }
}
