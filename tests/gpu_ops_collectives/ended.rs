//! Tests of operations whose communicator is suspended or revoked, or has ended.

use devcomm::{
    AllGatherGemm, Buffer, Collectives, CommConfig, Communicator, Error, ExpertParallelOptions,
    GemmAllReduce, GemmReduceScatter, Graph, Rank, ReduceOp, Result, Simulation, Stream,
    SymmetricBuffer, Tokens, World,
};
use half::bf16;

/// Rows, columns and the depth of the products, and elements of a token.
const N: usize = 64;
/// The number of elements of each product's factors and result.
const SQUARE: usize = N * N;

const TOKENS: usize = 4;

/// A call, by its name.
type Operation<'a> = (&'static str, Box<dyn Fn() -> Result<()> + 'a>);

/// Memory of a communicator that stays.
struct Memory {
    x: SymmetricBuffer<bf16>,
    y: SymmetricBuffer<bf16>,
    ids: SymmetricBuffer<i32>,
    weights: SymmetricBuffer<f32>,
}

impl Memory {
    fn new(comm: &Communicator) -> Result<Self> {
        let (x, y) = (comm.mem_alloc(SQUARE)?, comm.mem_alloc(SQUARE)?);
        let (ids, weights) = (comm.mem_alloc(2 * TOKENS)?, comm.mem_alloc(2 * TOKENS)?);
        x.copy_from_host(&[bf16::ONE; SQUARE])?;
        ids.copy_from_host(&[0; 2 * TOKENS])?;
        weights.copy_from_host(&[1.0; 2 * TOKENS])?;
        Ok(Self { x, y, ids, weights })
    }

    /// Returns calls of objects of all kinds that use this communicator.
    fn operations<'a>(
        &'a self,
        comm: &Communicator,
        stream: &'a Stream,
    ) -> Result<Vec<Operation<'a>>> {
        let Self { x, y, ids, weights } = self;
        let collectives = Collectives::new(comm)?;
        let all_reduce = GemmAllReduce::new(comm, stream, N, N)?;
        let reduce_scatter = GemmReduceScatter::new(comm, stream, N, N)?;
        let all_gather = AllGatherGemm::new(comm, stream, N, N)?;
        let few = ExpertParallelOptions::new(N, TOKENS, 4, 2).build(comm)?;
        let many =
            ExpertParallelOptions::new(N, TOKENS, 4, 2).throughput(4 * TOKENS).build(comm)?;
        let tokens = move || Tokens { count: TOKENS, input: x, ids, weights };
        let whole = [N, N, N];
        let half = x.slice(..SQUARE / 2)?;
        let half_result = y.slice(..SQUARE / 2)?;
        let window = comm.window::<bf16>(SQUARE)?;
        Ok(vec![
            ("all_reduce", Box::new(move || collectives.all_reduce(x, y, ReduceOp::Sum, stream))),
            ("GemmAllReduce", Box::new(move || all_reduce.launch(x, x, &window, whole))),
            (
                "GemmReduceScatter",
                Box::new(move || reduce_scatter.launch(x, x, &half_result, whole)),
            ),
            ("AllGatherGemm", Box::new(move || all_gather.launch(&half, x, y, whole))),
            ("ExpertParallel", Box::new(move || few.dispatch(tokens(), stream))),
            ("ExpertParallel for throughput", Box::new(move || many.dispatch(tokens(), stream))),
        ])
    }
}

/// Makes the communicator unusable by `end`, and checks that all operations and graphs of them are
/// refused on rank 0, without the other rank. `again` makes it usable.
fn refused_after(
    state: &'static str,
    end: fn(&Communicator) -> Result<()>,
    again: Option<fn(&Communicator) -> Result<()>>,
) {
    for checked in [false, true] {
        let simulation = Simulation::new(2).multiprocessors(2);
        let world = World::builder().checked(checked).simulate(simulation).threads(2).unwrap();
        let ran = world.run(|rank: &Rank| {
            let (comm, stream) = (rank.new_communicator(&CommConfig::new())?, rank.stream()?);
            let memory = Memory::new(rank.communicator()?)?;
            let operations = memory.operations(&comm, &stream)?;
            let mut graphs: Vec<Graph> = Vec::new();
            for (_, operation) in &operations {
                operation()?;
                stream.synchronize()?;
                graphs.push(stream.capture(operation)?);
            }
            rank.barrier()?;
            end(&comm)?;
            if rank.is_root() {
                for ((name, operation), graph) in operations.iter().zip(&graphs) {
                    let refused = operation().unwrap_err().to_string();
                    // The error is the operation's, or that of the launch of its kernel.
                    assert!(refused.contains(&format!("is {state}")), "{name}: {refused}");
                    let refused = graph.launch(&stream).unwrap_err();
                    assert!(matches!(refused, Error::State(_)), "{name}: {refused}");
                }
            }
            rank.barrier()?;
            let Some(again) = again else { return Ok(()) };
            again(&comm)?;
            for (_, operation) in &operations {
                operation()?;
            }
            for graph in &graphs {
                graph.launch(&stream)?;
            }
            stream.synchronize()
        });
        ran.unwrap_or_else(|error| panic!("{state}: {error}"));
    }
}

#[test]
fn operations_of_a_suspended_communicator_are_refused_until_it_is_resumed() {
    refused_after("suspended", Communicator::suspend, Some(Communicator::resume));
}

#[test]
fn operations_of_a_revoked_communicator_are_refused() {
    refused_after("revoked", Communicator::revoke, None);
}

#[test]
fn operations_of_a_destroyed_communicator_are_refused() {
    refused_after("destroyed", Communicator::destroy, None);
}
