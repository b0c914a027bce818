//! What expert parallelism sends: counted, and by a formula, which `docs/findings.md` has for more
//! ranks than the kernels take.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use devcomm::sim::Traffic;
use devcomm::{Error, ExpertParallelOptions, Result, Stream, Tokens, World};
use devcomm_testing::experts::{Batch, Routing};
use half::bf16;

/// Elements of 16 bytes.
const VECTOR: usize = 8;

/// What each rank sends to each other one.
type Pairs = BTreeMap<(usize, usize), (usize, usize)>;

/// Stores of 16 bytes, each a message of its own, for a row and what else is sent to a rank.
struct Messages {
    /// Of a row of so many elements.
    row: usize,
    /// To every rank.
    always: usize,
}

impl Messages {
    /// A message for each token and expert, and the number of tokens.
    fn of_dispatch(hidden: usize, tokens: usize, top_k: usize) -> Self {
        Self { row: hidden / VECTOR, always: tokens * top_k + 1 }
    }

    /// One that says that the rank has come so far.
    fn of_combine(hidden: usize) -> Self {
        Self { row: hidden / VECTOR, always: 1 }
    }

    /// Stores, and their bytes.
    fn of_rows(&self, rows: usize) -> (usize, usize) {
        let stores = rows * self.row + self.always;
        (stores, 16 * stores)
    }
}

/// What is sent to dispatch a batch, and to combine its results.
fn expected(batch: &Batch) -> [Pairs; 2] {
    let (ranks, hidden) = (batch.tokens.len(), batch.hidden);
    let pairs = || {
        let all = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        all.filter(|(from, to)| from != to)
    };
    let dispatch = pairs().map(|(from, to)| {
        let messages = Messages::of_dispatch(hidden, batch.tokens[from], batch.top_k);
        ((from, to), messages.of_rows(batch.tokens_to(from, to).count()))
    });
    let combine = pairs().map(|(from, to)| {
        // A row for each token that has experts there.
        let rows = batch.tokens_to(to, from).count();
        ((from, to), Messages::of_combine(hidden).of_rows(rows))
    });
    [dispatch.collect(), combine.collect()]
}

/// What the simulator counts of both.
fn counted(batch: &Batch) -> Result<[Pairs; 2]> {
    let (ranks, most) = (batch.tokens.len(), batch.tokens.iter().copied().max().unwrap_or(0));
    let counts = World::simulated(ranks)?.run(|rank| {
        let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
        let options = ExpertParallelOptions::new(batch.hidden, most, batch.experts, batch.top_k);
        let experts = options.blocks(2).threads(64).build(comm)?;
        let input = comm.mem_alloc::<bf16>(most * batch.hidden)?;
        let ids = comm.mem_alloc::<i32>(most * batch.top_k)?;
        let weights = comm.mem_alloc::<f32>(most * batch.top_k)?;
        let rows = comm.mem_alloc::<bf16>(experts.most_rows() * batch.hidden)?;
        input.copy_from_host(&batch.inputs[me])?;
        ids.copy_from_host(&batch.ids[me])?;
        weights.copy_from_host(&batch.weights[me])?;
        let machine = rank.simulated_machine().expect("the world is simulated");
        let count = |stream: &Stream, work: &dyn Fn() -> Result<()>| {
            rank.barrier()?;
            if rank.is_root() {
                machine.record_traffic();
            }
            rank.barrier()?;
            work()?;
            stream.synchronize()?;
            rank.barrier()?;
            let of_pair = |Traffic { stores, stored_bytes, puts, .. }: Traffic| {
                assert_eq!(puts, 0);
                (stores as usize, stored_bytes as usize)
            };
            Ok::<Pairs, Error>(
                machine.traffic().into_iter().map(|(pair, sent)| (pair, of_pair(sent))).collect(),
            )
        };
        let dispatch = count(&stream, &|| {
            let (ids, weights) = (&ids, &weights);
            let tokens = Tokens { count: batch.tokens[me], input: &input, ids, weights };
            experts.dispatch(tokens, &stream)
        })?;
        let combine = count(&stream, &|| {
            experts.group(&rows, &stream)?;
            experts.combine(&rows, &input, None, &stream)
        })?;
        Ok::<_, Error>([dispatch, combine])
    })?;
    Ok(counts.into_iter().next().unwrap_or_default())
}

#[test]
fn experts_send_as_many_bytes_as_the_formula_says() -> Result<()> {
    for (ranks, routing) in [
        (2, Routing::Random),
        (2, Routing::None),
        (4, Routing::Skewed),
        (4, Routing::One),
        (8, Routing::Random),
    ] {
        let tokens: Vec<usize> = (0..ranks).map(|rank| (3 * rank + 2) % 5).collect();
        let batch = Batch::new(264, 2 * ranks, 2, &tokens, 1).routed(routing, 2);
        let (counted, expected) = (counted(&batch)?, expected(&batch));
        assert_eq!(counted, expected, "{ranks} ranks, {routing:?}");
    }
    Ok(())
}

/// How many other ranks have experts of a token, on average, if each has as many of all `experts`,
/// and a token has any `top_k` of them.
fn destinations(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let elsewhere = experts - experts / ranks;
    let none: f64 =
        (0..top_k).map(|k| elsewhere.saturating_sub(k) as f64 / (experts - k) as f64).product();
    (ranks - 1) as f64 * (1.0 - none)
}

/// Rows of the table, for 128 tokens of 7,168 elements in bf16 with 8 of 256 experts.
fn table() -> Vec<String> {
    const HIDDEN: usize = 7168;
    const TOP_K: usize = 8;
    let (tokens, experts) = (128, 256);
    // Of DeepEP: the row, 4 bytes for each expert, for each weight and for the token.
    const THEIR_ROW: usize = 2 * HIDDEN + 8 * TOP_K + 4;
    [2, 4, 8, 16, 32, 64]
        .map(|ranks| {
            let rows = tokens as f64 * destinations(ranks, experts, TOP_K);
            let of = |messages: Messages| {
                let always = (ranks - 1) * messages.always;
                let stores = rows * messages.row as f64 + always as f64;
                (stores, 16.0 * stores, 16 * always)
            };
            let (stores, bytes, routing) = of(Messages::of_dispatch(HIDDEN, tokens, TOP_K));
            let (_, returned, _) = of(Messages::of_combine(HIDDEN));
            let theirs = rows * THEIR_ROW as f64;
            format!(
                "| {ranks} | {rows:.0} | {:.2} | {:.2} | {:.1} % | {stores:.0} | {:.2} | {:.2} |",
                bytes / 1e6,
                theirs / 1e6,
                100.0 * routing as f64 / bytes,
                returned / 1e6,
                rows * 2.0 * HIDDEN as f64 / 1e6,
            )
        })
        .to_vec()
}

#[test]
fn the_table_of_what_experts_send_is_that_of_the_formula() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/findings.md");
    let findings = fs::read_to_string(path).unwrap();
    let table = table().join("\n");
    assert!(findings.contains(&table), "docs/findings.md has another table than\n{table}");
}
