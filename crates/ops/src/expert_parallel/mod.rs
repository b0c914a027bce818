//! Expert parallelism: tokens go to the ranks of their experts, and the experts' results return.

mod form;
mod grouping;
mod hybrid;
mod in_flight;
mod lsa;
mod options;
mod steps;
mod throughput;

use std::fmt;
use std::sync::Arc;

use devcomm_kernels::expert_parallel::shape::{ShapeArgs, TokensArgs};
use devcomm_kernels::expert_parallel::{Faults, Shape, Steps};
use parking_lot::Mutex;

use self::form::{Form, Launch, Outputs};
use self::hybrid::{Division, Hybrid};
use self::in_flight::{Halves, InFlight};
pub use self::in_flight::{Returning, Sent};
use self::lsa::Lsa;
pub use self::options::{ExpertParallelMemory, ExpertParallelOptions};
use self::steps::{GraphSteps, Last, Place, Stage};
use self::throughput::Throughput;
use crate::prelude::*;

/// Expert parallelism on a communicator of up to 64 ranks that load and store reach, or of several
/// LSA teams: owns the kernels and their memory, and launches them. 2, 4 and 8 ranks of one team
/// have kernels of their own.
///
/// Between LSA teams rows go over the network (GIN), once to each team with one of the token's
/// experts, and each team returns one row.
///
/// All ranks have the same number of experts, rank 0 the first ones, and tokens of their own, rows
/// in bf16. A step of a layer is
///
/// 1. [`dispatch`](Self::dispatch): each token's row goes once to each rank with one of its
///    experts;
/// 2. [`group`](Self::group): what a rank has received is put in the order of its experts, once for
///    each expert of a row, for a grouped product;
/// 3. [`combine`](Self::combine): the experts' rows return, times the token's weights, and are
///    added up in f32.
///
/// Every rank calls the same operations in the same order; the number of tokens may differ between
/// ranks, and be 0. Launches are dependent ones, use no memory of the host, and may be captured in
/// graphs. Only work on the operation's stream may access its buffers until it has ended. All
/// results are determined by the inputs.
///
/// What is captured counts as done at each launch of the graph, and not before. A graph that begins
/// with `group` or `combine` continues the last step before it: at a launch that step must have as
/// many tokens as when the graph was captured and, for `combine`, a `group` with as much room.
/// Another launch fails. What was captured in a graph of another library counts as done even if
/// that capture fails, and the next operation is then a dispatch.
///
/// The operations fill the GPU: those of other objects on other streams wait for them, or they for
/// those, in the order of the host's calls, which is the same on all ranks.
///
/// ```no_run
/// use devcomm::{Buffer, ExpertParallel, ExpertParallelOptions, Tokens, World};
/// use half::bf16;
///
/// World::from_env()?.run(|rank| {
///     let (comm, stream) = (rank.communicator()?, rank.stream()?);
///     // At most 128 tokens of 7168 elements, with 8 of 256 experts each.
///     let experts = ExpertParallelOptions::new(7168, 128, 256, 8).build(comm)?;
///     let input = comm.mem_alloc::<bf16>(128 * 7168)?;
///     let (ids, weights) = (comm.mem_alloc::<i32>(128 * 8)?, comm.mem_alloc::<f32>(128 * 8)?);
///     let rows = comm.mem_alloc::<bf16>(experts.most_rows() * 7168)?;
///     let tokens = Tokens { count: 128, input: &input, ids: &ids, weights: &weights };
///     experts.dispatch(tokens, &stream)?;
///     experts.group(&rows, &stream)?;
///     // The experts: a `GroupedGemm` of these groups, or any other work on their rows.
///     let (_groups, results) = (experts.groups(), rows);
///     experts.combine(&results, &input, None, &stream)?;
///     experts.check()
/// })?;
/// # Ok::<_, devcomm::Error>(())
/// ```
pub struct ExpertParallel {
    communicator: Communicator,
    compiled: Kernels,
    options: ExpertParallelOptions,
    /// The shapes of launches that send tokens, and of those that return results.
    sent: Shape,
    shape: Shape,
    form: Box<dyn Form>,
    /// What `group` writes, beside rows.
    offsets: SymmetricBuffer<u32>,
    sizes: SymmetricBuffer<u32>,
    origins: SymmetricBuffer<u32>,
    /// The words of [`Faults`], which kernels write and `check` reads.
    faults: SymmetricBuffer<u32>,
    order: StreamOrder,
    /// The last step on the GPU, which launches of graphs change too.
    last: Arc<Mutex<Last>>,
    /// The steps of the last capture.
    captured: RefCell<Option<Arc<GraphSteps>>>,
    in_flight: RefCell<Option<InFlight>>,
    flights: Cell<u64>,
    absent: Cell<u64>,
}

/// Tokens of this rank, with their routing.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// The number of tokens.
    pub count: usize,
    /// `count` rows, aligned to 16 bytes. Bits of zeros may change their sign on the way.
    pub input: &'a dyn Buffer<Element = bf16>,
    /// The experts of each token, in any order: numbers from 0, or -1 for none. Numbers without an
    /// expert count as -1, and are reported by [`ExpertParallel::check`].
    pub ids: &'a dyn Buffer<Element = i32>,
    /// The weights of these experts.
    pub weights: &'a dyn Buffer<Element = f32>,
}

const THREADS: u32 = 256;
const MANY_THREADS: u32 = 512;
/// The fewest blocks that receive, as a peer may have many tokens.
const FEWEST_BLOCKS: u32 = 32;

const NAME: &str = "ExpertParallelOptions::build";

impl ExpertParallel {
    /// Allocates the memory of these sizes. *Collective*.
    fn new(comm: &Communicator, options: ExpertParallelOptions) -> Result<Self> {
        let ranks = comm.n_ranks();
        let own = || {
            let teams = comm.properties()?.n_lsa_teams;
            let shape = options.shape(ranks, teams)?;
            let files = match options.rows {
                _ if teams > 1 => &Hybrid::FILES,
                Some(_) => &Throughput::FILES,
                None => &Lsa::FILES,
            };
            let compiled = Kernels::load(comm.context(), &KERNELS.only(files))?;
            Ok(((shape, teams, compiled), comm.context().limits().multiprocessors))
        };
        let ((shape, teams, compiled), multiprocessors) =
            options.call(comm.collective(NAME)).agree(own())?;
        let form: Box<dyn Form> = match options.rows {
            _ if teams > 1 => {
                // A block sends to the block with the same index in other ranks.
                let fewest = multiprocessors.into_iter().min().unwrap_or(0);
                let division = Division::new(options, teams, ranks, fewest)?;
                Box::new(Hybrid::new(comm, options, shape, division)?)
            }
            Some(_) => Box::new(Throughput::new(comm, options, shape)?),
            None => Box::new(Lsa::new(comm, options, shape)?),
        };
        // No rank sends before the slots of all are empty: the ranks meet at the end of the call.
        Ok(Self {
            communicator: comm.clone(),
            compiled,
            options,
            sent: options.sent(shape),
            shape,
            form,
            offsets: comm.mem_alloc(options.local(ranks) + 1)?,
            sizes: comm.mem_alloc(options.local(ranks))?,
            origins: comm.mem_alloc(options.most_rows(ranks))?,
            faults: comm.mem_alloc(Faults::WORDS)?,
            order: StreamOrder::concurrent(comm.context(), 1)?,
            last: Arc::new(Mutex::new(Last::NONE)),
            captured: RefCell::default(),
            in_flight: RefCell::default(),
            flights: Cell::default(),
            absent: Cell::new(0),
        })
    }

    /// Sends the tokens to the ranks of their experts, and receives those of all ranks.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for more tokens than there is memory for, buffers that are too
    /// short, not aligned or of another context, rows of tokens that overlap
    /// [`rows`](Self::rows), and if what was sent has not been received; those of the launch.
    pub fn dispatch(&self, tokens: Tokens<'_>, stream: &Stream) -> Result<()> {
        self.launch_dispatch(tokens, Steps::SEND | Steps::RECEIVE, stream)
    }

    /// Does the first half of [`dispatch`](Self::dispatch), with its errors: sends the tokens. Work
    /// that is enqueued before [`Sent::receive`] overlaps their way, but not operations of this
    /// object, which are refused.
    pub fn start_dispatch(&self, tokens: Tokens<'_>, stream: &Stream) -> Result<Sent<'_>> {
        let send = || self.launch_dispatch(tokens, Steps::SEND, stream);
        Ok(Sent(self.begin_flight(stream, Halves::Tokens(tokens.count), send)?))
    }

    fn launch_dispatch(&self, tokens: Tokens<'_>, steps: u32, stream: &Stream) -> Result<()> {
        self.end_flight()?;
        let place = self.place(stream)?;
        let (count, most) = (tokens.count, self.options.tokens);
        refuse_if!(count > most, "{count} tokens, and there is memory for {most} of a rank");
        let (input, top_k) = (tokens.input.device_slice(), self.options.top_k);
        let (ids, weights) = (tokens.ids.device_slice(), tokens.weights.device_slice());
        let context = self.communicator.context();
        let at = self.check_rows("the tokens' rows", &input, count)?;
        if self.options.rows.is_some() {
            // Ranks that have sent already store to the memory in which rows arrive.
            let (len, arrivals) = (count * self.options.hidden, self.form.arrivals()?);
            let to = ("the memory in which rows arrive", &arrivals.device_slice(), arrivals.len());
            require_apart(("the tokens' rows", &input, len), to, None)?;
        }
        let sent = TokensArgs {
            input: at,
            ids: address(context, "the experts of the tokens", &ids, 1, count * top_k)?,
            weights: address(context, "the weights of the tokens", &weights, 1, count * top_k)?,
            count: count as u32,
        };
        Launch { experts: self, steps, stream, place }.dispatch(sent)
    }

    /// Returns the experts' results to the tokens: `output` gets for each token of the last
    /// dispatch the sum of the rows of its experts times their weights, plus its row of `residual`,
    /// in f32, with one rounding for each rank, one for each of several LSA teams, and one at the
    /// end. `rows` are the results, where [`group`](Self::group) has put the rows. `output`
    /// overlaps no other buffer, except that it may begin where the residual does.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] if there was no `group` since the last dispatch, for buffers that
    /// are too short, not aligned, of another context or overlap `output`; those of the launch.
    pub fn combine(
        &self,
        rows: &impl Buffer<Element = bf16>,
        output: &impl Buffer<Element = bf16>,
        residual: Option<&DeviceSlice<bf16>>,
        stream: &Stream,
    ) -> Result<()> {
        let (at, place) = self.check_results(rows, stream)?;
        let outputs = self.check_outputs(place.last, &rows.device_slice(), output, residual)?;
        let steps = Steps::SEND | Steps::RECEIVE;
        Launch { experts: self, steps, stream, place }.combine(at, outputs)
    }

    /// Does the first half of [`combine`](Self::combine), with its errors: sends the results. Work
    /// that is enqueued before [`Returning::receive`] overlaps their way, and leaves `rows` alone.
    pub fn start_combine<R>(&self, rows: &R, stream: &Stream) -> Result<Returning<'_>>
    where
        R: Buffer<Element = bf16>,
    {
        let send = || {
            let (at, place) = self.check_results(rows, stream)?;
            Launch { experts: self, steps: Steps::SEND, stream, place }.combine(at, [0; 2])
        };
        Ok(Returning(self.begin_flight(stream, Halves::Results(rows.device_slice()), send)?))
    }

    /// Checks the experts' results; returns their address, and where the operation goes.
    fn check_results(
        &self,
        rows: &impl Buffer<Element = bf16>,
        stream: &Stream,
    ) -> Result<(u64, Place)> {
        self.end_flight()?;
        let place @ Place { last, .. } = self.place(stream)?;
        refuse_if!(
            last.stage != Stage::Grouped,
            "the rows of the last dispatch are in no order: `group` does that"
        );
        let rows = rows.device_slice();
        Ok((self.check_rows("the experts' results", &rows, last.grouped)?, place))
    }

    /// Checks where the sums of the experts' results `rows` go, and what is added to them.
    fn check_outputs(
        &self,
        Last { tokens, grouped, .. }: Last,
        rows: &DeviceSlice<bf16>,
        output: &impl Buffer<Element = bf16>,
        residual: Option<&DeviceSlice<bf16>>,
    ) -> Result<Outputs> {
        let (output, hidden) = (output.device_slice(), self.options.hidden);
        let at = self.check_rows("the output", &output, tokens)?;
        let to = ("the output", &output, tokens * hidden);
        require_apart(("the experts' results", rows, grouped * hidden), to, None)?;
        let of_residual = |residual| {
            let at = self.check_rows("the residual", residual, tokens)?;
            require_apart(("the residual", residual, tokens * hidden), to, Some(0))?;
            Ok::<_, Error>(at)
        };
        Ok([at, residual.map_or(Ok(0), of_residual)?])
    }

    /// Waits for the last operation, and fails if the routing of any operation since the last check
    /// was wrong: experts that do not exist, which count as none, or more rows than
    /// [`group`](Self::group) had room for, which are missing; in the form for high throughput, in
    /// any rank. It cannot be captured.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] with what was wrong; those of the kernels.
    pub fn check(&self) -> Result<()> {
        let mut words = [0; Faults::WORDS];
        self.faults.copy_to_host(&mut words)?;
        let least_room = {
            let mut last = self.last.lock();
            let grouped = last.grouped;
            std::mem::replace(&mut last.least_room, grouped)
        };
        if words == [0; Faults::WORDS] {
            return Ok(());
        }
        self.faults.fill_bytes(0)?;
        let (ids, id, rows) = (words[Faults::IDS], words[Faults::ID] as i32, words[Faults::ROWS]);
        let mut wrong = Vec::new();
        if ids > 0 {
            // Not 0: the kernels write 1 + an index with the first of the ids.
            let (index, top_k) = (words[Faults::INDEX] - 1, self.shape.top_k);
            let (token, k) = (index / top_k, index % top_k);
            wrong.push(format!(
                "{ids} experts of tokens do not exist: among them {id}, number {k} of token \
                 {token}; there are {} experts, and -1 is none",
                self.options.experts
            ));
        }
        if rows > 0 {
            let (whose, room) = match words[Faults::RANK].checked_sub(1) {
                None => ("this rank".to_owned(), least_room),
                Some(rank) => (format!("rank {rank}"), self.most_rows()),
            };
            wrong.push(format!(
                "the experts of {whose} need {rows} rows, and there was room for {room}"
            ));
        }
        refuse(wrong.join("; "))
    }

    /// Declares these ranks, and no others, absent for later work on the stream: nothing is sent to
    /// them and nothing awaited from them. Their tokens count as none, and so do their experts,
    /// whose part of a result is left out. It cannot be captured, but applies to later launches of
    /// graphs that were captured before.
    ///
    /// An absent rank need not run. Before it comes back, all operations of all ranks must have
    /// ended, and it must have done the same number of dispatches and combines as the others, with
    /// these ranks absent for it. Of two ranks each one is absent for the other, or neither is; in
    /// the form for high throughput, the same ranks are absent for all ranks that are not absent.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a rank that does not exist, this one, while rows are on their
    /// way, and in several LSA teams; those of the stream.
    pub fn set_absent(&self, ranks: &[usize], stream: &Stream) -> Result<()> {
        let word = self.form.absent()?;
        let what = "ranks are declared absent";
        self.communicator.context().refuse_capturing(what)?;
        refuse_if!(stream.is_capturing()?, "{what} while the stream is captured");
        self.end_flight()?;
        let (me, n_ranks) = (self.communicator.rank(), self.communicator.n_ranks());
        let mut absent = 0;
        for &rank in ranks {
            refuse_if!(
                rank >= n_ranks || rank == me,
                "rank {rank} is absent: it is another one of {n_ranks} than this one, {me}"
            );
            absent |= 1 << rank;
        }
        let _turn = self.begin(self.place(stream)?, stream)?;
        stream.fill(word, absent)?;
        self.absent.set(absent);
        Ok(())
    }

    fn check_rows<T>(&self, name: &str, slice: &DeviceSlice<T>, rows: usize) -> Result<u64> {
        aligned(self.communicator.context(), name, slice, rows, self.options.hidden)
    }

    fn multiprocessors(&self) -> u32 {
        self.communicator.context().limits().multiprocessors
    }

    /// Returns the shape of a launch whose warps send `parts` parts: with a block for each part,
    /// but at most one for each multiprocessor, so that all run at the same time.
    fn config(&self, parts: u32, threads: u32) -> LaunchConfig {
        let multiprocessors = self.multiprocessors();
        let blocks = self.options.blocks.unwrap_or_else(|| parts.max(FEWEST_BLOCKS));
        let threads = self.options.threads.unwrap_or(threads);
        let config = LaunchConfig::new(blocks.min(multiprocessors), threads);
        config.with_dependent().without_cooperation()
    }
}

fn shape_args(Shape { tokens, vectors, top_k, experts }: Shape) -> ShapeArgs<u32, u32, u32, u32> {
    ShapeArgs { tokens, vectors, top_k, experts }
}

impl fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, form) = (self.communicator.n_ranks(), self.form.describe());
        write!(f, "ExpertParallel({ranks} ranks{form})")
    }
}
