//! Tests of operations.

use super::*;
use crate::base::ids::ClientId;
use crate::memory::{Allocation, GpuSet, Memory};

#[test]
fn a_sequence_continues_the_chain_of_a_dropped_one_whose_end_the_host_knows() {
    let races = Races::new(true, false, 0);
    let (first, ended) = races.as_host(ClientId::default(), Some(0), || {
        let sequence = races.host_sequence();
        let mut run = races.start(&sequence, 0, &races.host());
        races.within(&mut run, || races.current("an operation"));
        (sequence.chain, races.end(run))
    });
    races.as_host(ClientId::default(), Some(0), || {
        assert_ne!(races.host_sequence().chain, first, "nobody has waited for its operation");
        races.host_learns(&ended);
        let after = [races.host_sequence(), races.host_sequence()];
        let mut same = after.iter().filter(|sequence| sequence.chain == first);
        let number = same.next().map(|sequence| races.start(sequence, 0, &ended).number);
        assert!(number > Some(1) && same.next().is_none(), "{number:?}");
    });
}

#[test]
fn more_operations_than_accesses_have_numbers_for_are_an_error() {
    let memory = Rc::new(Memory::new(Races::new(true, false, 0)));
    let words = Allocation::single(&memory, GpuSet::all(), 4, Owner::Buffer { id: 0, rank: 0 });
    let words = words.unwrap();
    let address = words.part(0).addr();
    let access = |op| {
        let known = (OpId(op), Clock::default());
        memory.races.op_access(memory.as_ref(), &known, address, 4, OpAccess::Write)
    };
    access(MAX_OPS).unwrap();
    let error = access(MAX_OPS + 1).unwrap_err().to_string();
    assert!(error.contains("Simulation::races"), "{error}");
}
