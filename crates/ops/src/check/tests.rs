//! Tests of checks of arguments.

use devcomm_host::World;

use super::*;

pub(crate) fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "it was accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_matrix_that_is_too_short_or_not_aligned_is_refused_by_its_name() {
    assert!(check_len("A", 56, 7, 8).is_ok());
    assert!(message(check_len("A", 55, 7, 8)).contains("A has 55 elements"));
    assert!(message(check_len("B", usize::MAX, usize::MAX, 2)).contains("B has"));
    let run = |rank: &devcomm_host::Rank| {
        let comm = rank.communicator()?;
        let memory = comm.mem_alloc::<f32>(16)?;
        let address_of =
            |first| aligned(comm.context(), "C", &memory.slice(first..first + 8)?, 1, 8);
        assert_eq!(address_of(4)?, memory.device_address() + 16);
        let refused = format!("C begins at {:#x}", memory.device_address() + 8);
        assert!(message(address_of(2)).contains(&refused));
        Ok::<_, Error>(())
    };
    World::simulated(1).unwrap().run(run).unwrap();
}
