//! Tests of what expert parallelism sends: the simulator's counts are those of a formula, and the
//! tables in `docs/findings.md` are from this formula.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use devcomm::sim::{Simulation, Traffic};
use devcomm::{Error, ExpertParallelOptions, Result, Tokens, World};
use devcomm_testing::experts::{Batch, Routing};
use half::bf16;

/// The number of bf16 elements in a vector of 16 bytes.
const VECTOR: usize = 8;

/// The traffic from each rank to each other rank.
type Pairs = BTreeMap<(usize, usize), Traffic>;

/// The form of an `ExpertParallel`.
#[derive(Clone, Copy, Debug)]
enum Form {
    LowLatency,
    Throughput,
    /// LSA teams of this number of ranks.
    Teams(usize),
}

/// The number of blocks of each kernel.
const BLOCKS: usize = 2;

/// The number of words that the form for high throughput sends with a token's row: which rows are
/// the token's, where it comes from and where its result goes.
const TOKEN_WORDS: usize = 2 * 16 + 2;

/// Returns the traffic of this number of stores of vectors, and of words.
fn stores(vectors: usize, words: usize) -> Traffic {
    let mut traffic = Traffic::default();
    traffic.stores = (vectors + words) as u64;
    traffic.stored_bytes = (16 * vectors + 4 * words) as u64;
    traffic
}

/// Returns the traffic of puts over the network, each with this number of vectors.
fn puts(messages: impl Iterator<Item = usize>) -> Traffic {
    let mut traffic = Traffic::default();
    for vectors in messages {
        traffic.puts += 1;
        traffic.put_bytes += 16 * vectors as u64;
    }
    traffic
}

impl Form {
    /// Returns what is sent to dispatch a batch, and to combine its results.
    fn expected(self, batch: &Batch) -> [Pairs; 2] {
        let ranks = batch.tokens.len();
        let all = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
        let pairs: Vec<_> = all.filter(|(from, to)| from != to).collect();
        let sent = |traffic: &dyn Fn(usize, usize) -> Traffic| -> Pairs {
            let sent = pairs.iter().map(|(from, to)| ((*from, *to), traffic(*from, *to)));
            // The simulator has no entry for pairs that send nothing.
            sent.filter(|(_, traffic)| *traffic != Traffic::default()).collect()
        };
        [
            sent(&|from, to| self.dispatched(batch, from, to)),
            sent(&|from, to| self.returned(batch, from, to)),
        ]
    }

    /// Returns what a rank sends to another one to dispatch a batch.
    fn dispatched(self, batch: &Batch, from: usize, to: usize) -> Traffic {
        let (row, tokens) = (batch.hidden / VECTOR, batch.tokens[from]);
        let rows = batch.tokens_to(from, to).count();
        match self {
            // A message for each token and expert, and the number of tokens.
            Self::LowLatency => stores(rows * row + tokens * batch.top_k + 1, 0),
            // The counts of each expert and rank, and two flags.
            Self::Throughput => {
                let counts = batch.experts + batch.tokens.len();
                stores(rows * row, counts + 2 + rows * TOKEN_WORDS)
            }
            Self::Teams(team) if from / team == to / team => {
                // It passes on what the ranks of its rail have sent: experts and weights of all
                // their tokens, the number of tokens, and rows. Each block has two barriers.
                let rail = (from % team..batch.tokens.len()).step_by(team);
                let [rows, entries, ranks] = rail.fold([0; 3], |[rows, entries, ranks], source| {
                    let (more, tokens) =
                        (batch.tokens_to(source, to).count(), batch.tokens[source]);
                    [rows + more, entries + tokens * batch.top_k, ranks + 1]
                });
                stores(rows * row, 2 * entries + ranks + 2 * BLOCKS)
            }
            Self::Teams(team) if from % team == to % team => {
                // A header, two words for each expert, and the rows of a batch.
                puts(messages(batch, from).map(|tokens| {
                    let rows = tokens.clone().filter(|token| is_for(batch, from, *token, to, team));
                    1 + (tokens.len() * batch.top_k).div_ceil(2) + rows.count() * row
                }))
            }
            Self::Teams(_) => Traffic::default(),
        }
    }

    /// Returns what a rank sends to another one to combine the results.
    fn returned(self, batch: &Batch, from: usize, to: usize) -> Traffic {
        let row = batch.hidden / VECTOR;
        let rows = |source| batch.tokens_to(source, from).count();
        match self {
            // One message says that the rank has sent its rows.
            Self::LowLatency => stores(rows(to) * row + 1, 0),
            // Two flags.
            Self::Throughput => stores(rows(to) * row, 2),
            Self::Teams(team) if from / team == to / team => {
                // It sends sums for the tokens of all ranks of the receiver's rail.
                let rail = (to % team..batch.tokens.len()).step_by(team);
                stores(rail.map(rows).sum::<usize>() * row, 2 * BLOCKS)
            }
            Self::Teams(team) if from % team == to % team => puts(messages(batch, to).map(|all| {
                let rows = all.filter(|token| is_for(batch, to, *token, from, team));
                (rows.count() * row).max(1)
            })),
            Self::Teams(_) => Traffic::default(),
        }
    }

    /// Returns the settings of a simulation for this form.
    fn simulation(self, ranks: usize) -> Simulation {
        let simulation = Simulation::new(ranks).multiprocessors(BLOCKS as u32);
        match self {
            Self::Teams(team) => simulation.team_size(team),
            _ => simulation,
        }
    }

    /// Returns what the simulator counts of a dispatch and of a combine.
    fn counted(self, batch: &Batch) -> Result<[Pairs; 2]> {
        let most = most_tokens(batch);
        let world = World::builder().simulate(self.simulation(batch.tokens.len())).from_env()?;
        let counts = world.run(|rank| {
            let (comm, stream, me) = (rank.communicator()?, rank.stream()?, rank.rank());
            let options =
                ExpertParallelOptions::new(batch.hidden, most, batch.experts, batch.top_k)
                    .blocks(BLOCKS as u32)
                    .threads(64);
            let options = match self {
                Self::Throughput => options.throughput(usize::MAX),
                _ => options,
            };
            let experts = options.build(comm)?;
            let input = comm.mem_alloc::<bf16>(most * batch.hidden)?;
            let ids = comm.mem_alloc::<i32>(most * batch.top_k)?;
            let weights = comm.mem_alloc::<f32>(most * batch.top_k)?;
            let rows = comm.mem_alloc::<bf16>(experts.most_rows() * batch.hidden)?;
            input.copy_from_host(&batch.inputs[me])?;
            ids.copy_from_host(&batch.ids[me])?;
            weights.copy_from_host(&batch.weights[me])?;
            let machine = rank.simulated_machine().expect("the world is simulated");
            let count = |work: &dyn Fn() -> Result<()>| {
                rank.barrier()?;
                if rank.is_root() {
                    machine.record_traffic();
                }
                rank.barrier()?;
                work()?;
                stream.synchronize()?;
                rank.barrier()?;
                Ok::<Pairs, Error>(machine.traffic().into_iter().collect())
            };
            let dispatch = count(&|| {
                let (ids, weights) = (&ids, &weights);
                let tokens = Tokens { count: batch.tokens[me], input: &input, ids, weights };
                experts.dispatch(tokens, &stream)
            })?;
            let combine = count(&|| {
                experts.group(&rows, &stream)?;
                experts.combine(&rows, &input, None, &stream)
            })?;
            Ok::<_, Error>([dispatch, combine])
        })?;
        Ok(counts.into_iter().next().unwrap_or_default())
    }
}

/// Returns the largest number of tokens of a rank.
fn most_tokens(batch: &Batch) -> usize {
    batch.tokens.iter().copied().max().unwrap_or(0)
}

/// Returns the tokens in each message that a rank sends to another team.
fn messages(batch: &Batch, rank: usize) -> impl Iterator<Item = Range<usize>> {
    let (most, tokens) = (most_tokens(batch), batch.tokens[rank]);
    let size = most.div_ceil(BLOCKS);
    (0..most).step_by(size).map(move |first| first.min(tokens)..(first + size).min(tokens))
}

/// Returns whether a token of a rank has experts in another rank's team.
fn is_for(batch: &Batch, rank: usize, token: usize, to: usize, team: usize) -> bool {
    let first = to / team * team;
    (first..first + team).any(|to| batch.tokens_to(rank, to).any(|other| other == token))
}

#[test]
fn experts_send_as_many_bytes_as_the_formula_says() -> Result<()> {
    use Form::{LowLatency, Teams, Throughput};
    for (form, ranks, routing) in [
        (LowLatency, 2, Routing::Random),
        (LowLatency, 2, Routing::None),
        (LowLatency, 4, Routing::Skewed),
        (LowLatency, 4, Routing::One),
        (LowLatency, 8, Routing::Random),
        (Throughput, 2, Routing::Random),
        (Throughput, 2, Routing::None),
        (Throughput, 4, Routing::Skewed),
        (Throughput, 4, Routing::One),
        (Throughput, 8, Routing::Random),
        (Teams(1), 2, Routing::Random),
        (Teams(2), 4, Routing::Skewed),
        (Teams(4), 8, Routing::None),
        (Teams(2), 8, Routing::Random),
    ] {
        let tokens: Vec<usize> = (0..ranks).map(|rank| (3 * rank + 2) % 5).collect();
        let batch = Batch::new(264, 2 * ranks, 2, &tokens, 1).routed(routing, 2);
        let (counted, expected) = (form.counted(&batch)?, form.expected(&batch));
        assert_eq!(counted, expected, "{form:?}, {ranks} ranks, {routing:?}");
    }
    Ok(())
}

#[test]
fn experts_of_64_ranks_send_as_many_bytes_as_the_formula_says() -> Result<()> {
    for form in [Form::LowLatency, Form::Throughput, Form::Teams(8)] {
        let tokens: Vec<usize> = (0..64).map(|rank| (2 * rank + 2) % 3).collect();
        let batch = Batch::new(24, 256, 8, &tokens, 1).routed(Routing::Random, 2);
        let (counted, expected) = (form.counted(&batch)?, form.expected(&batch));
        assert_eq!(counted, expected, "{form:?}");
    }
    Ok(())
}

/// Returns the average number of other ranks with experts of a token, if the `experts` are divided
/// evenly and a token has `top_k` of them at random. If `ranks` is a number of teams, it returns
/// the number of other teams.
fn destinations(ranks: usize, experts: usize, top_k: usize) -> f64 {
    let elsewhere = experts - experts / ranks;
    let none: f64 =
        (0..top_k).map(|k| elsewhere.saturating_sub(k) as f64 / (experts - k) as f64).product();
    (ranks - 1) as f64 * (1.0 - none)
}

// The tables are for this batch: 128 tokens of 7,168 elements in bf16 with 8 of 256 experts.
const TOKENS: usize = 128;
const HIDDEN: usize = 7168;
const EXPERTS: usize = 256;
const TOP_K: usize = 8;

/// The bytes of a row.
const ROW: f64 = 2.0 * HIDDEN as f64;

/// The bytes of a row in the layout of DeepEP, DeepSeek's library for expert parallelism: 4 bytes
/// more for each expert of the token, for each weight, and for the token's number.
const DEEP_EP_ROW: f64 = ROW + (8 * TOP_K + 4) as f64;

const MB: f64 = 1e6;

/// Returns the rows of the table of one LSA team.
fn table() -> Vec<String> {
    [2, 4, 8, 16, 32, 64]
        .map(|ranks| {
            let (rows, peers) =
                (TOKENS as f64 * destinations(ranks, EXPERTS, TOP_K), (ranks - 1) as f64);
            let routing = peers * 16.0 * (TOKENS * TOP_K + 1) as f64;
            let counts = peers * 4.0 * (EXPERTS + ranks + 2) as f64;
            let counted = counts + rows * 4.0 * TOKEN_WORDS as f64;
            let (low, high) = (rows * ROW + routing, rows * ROW + counted);
            format!(
                "| {ranks} | {rows:.0} | {:.2} | {:.1} % | {:.0} | {:.2} | {:.1} % | {:.2} | {:.2} \
                 | {:.2} |",
                low / MB,
                100.0 * routing / low,
                low / 16.0,
                high / MB,
                100.0 * counted / high,
                rows * DEEP_EP_ROW / MB,
                (rows * ROW + 16.0 * peers) / MB,
                rows * ROW / MB,
            )
        })
        .to_vec()
}

/// Returns the rows of the table of LSA teams of eight.
fn table_of_teams() -> Vec<String> {
    const TEAM: usize = 8;
    // The number of blocks of a kernel by default.
    const BLOCKS: usize = 32;
    [16, 32, 64]
        .map(|ranks| {
            let (teams, tokens) = (ranks / TEAM, TOKENS as f64);
            let rows = tokens * destinations(teams, EXPERTS, TOP_K);
            let puts = (teams - 1) * BLOCKS;
            let entries = puts * (16 + TOKENS / BLOCKS * TOP_K * 8);
            // The share of the rail's tokens that have experts on one certain rank of the team.
            let in_rank = destinations(ranks, EXPERTS, TOP_K) / (ranks - 1) as f64;
            let passed_on = (teams * (TEAM - 1)) as f64 * tokens * in_rank;
            let routing = (TEAM - 1) * (teams * (8 * TOKENS * TOP_K + 4) + 8 * BLOCKS);
            format!(
                "| {ranks} | {rows:.0} | {puts} | {:.2} | {:.2} | {:.2} | {passed_on:.0} | {:.2} | \
                 {:.2} |",
                (rows * ROW + entries as f64) / MB,
                rows * DEEP_EP_ROW / MB,
                rows * ROW / MB,
                (passed_on * ROW + routing as f64) / MB,
                passed_on * ROW / MB,
            )
        })
        .to_vec()
}

/// Returns the rows of the table of memory, for 4,096 tokens.
fn table_of_memory() -> Vec<String> {
    const TOKENS: usize = 4096;
    let options = ExpertParallelOptions::new(HIDDEN, TOKENS, EXPERTS, TOP_K);
    [2, 8, 64]
        .map(|ranks| {
            let gb = |options: ExpertParallelOptions| {
                options.memory(ranks).unwrap().total() as f64 / 1e9
            };
            let rows = 2 * TOKENS * TOP_K;
            let [low, high] = [gb(options), gb(options.throughput(rows))];
            let with_rows = low + rows as f64 * ROW / 1e9;
            format!("| {ranks} | {low:.2} | {with_rows:.2} | {high:.2} |")
        })
        .to_vec()
}

#[test]
fn the_tables_of_what_experts_send_are_those_of_the_formulas() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/findings.md");
    let findings = fs::read_to_string(path).unwrap();
    for table in [table(), table_of_teams(), table_of_memory()] {
        let table = table.join("\n");
        assert!(findings.contains(&table), "docs/findings.md has another table than\n{table}");
    }
}
