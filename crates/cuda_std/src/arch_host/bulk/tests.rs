use super::State;

#[test]
fn a_state_is_read_back_from_its_word() {
    for bytes in [0, 1, -1, 49152, -(1 << 20)] {
        for parity in [false, true] {
            let word = State { arrivals: 8, pending: 3, bytes, parity }.to_word();
            let State { arrivals, pending, bytes: b, parity: p } = State::of(word);
            assert_eq!((arrivals, pending, b, p), (8, 3, bytes, parity));
        }
    }
}
