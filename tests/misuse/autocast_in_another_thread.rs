// E0277: cannot be sent between threads safely
// Autocast is switched on and off for one thread, so its guard must not move to another.
use tch_extension::amp::Autocast;

fn move_away(guard: Autocast) {
    std::thread::spawn(move || drop(guard));
}

fn main() {
    let _ = move_away;
}
